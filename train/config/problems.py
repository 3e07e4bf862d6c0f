"""Checks what several sections of a run's file decide together. Each function yields the messages about one pair. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jgt import document
from jgt.document import InputError

from ..data.config import OwnData
from ..models.config import ModelConfig, OwnModel
from ..settings.code.names import is_name, name_problem
from ..settings.training import PAIRED, TrainConfig
from .config import OWN, Run
from .sync import sync_problems


def run_problems(run: Run) -> Iterator[str]:
    """All messages but those about the batch, which depend on the number of devices."""
    yield from _bucket_problems(run)
    yield from _own_problems(run)
    yield from _lora_problems(run)
    yield from _loss_problems(run)
    yield from _order_problems(run)
    yield from _early_problems(run)
    yield from _length_problems(run)
    yield from _stack_problems(run)
    yield from _further_problems(run)
    yield from sync_problems(run)


def without_effect(run: Run, *, has_held_out: bool) -> Iterator[str]:
    """Lines about settings that are allowed, such as in a short trial of a run, and have no effect. has_held_out: whether data is."""
    train, warmup = run.config.train, run.config.optimizer.warmup
    if train.eval_every and not has_held_out and not run.config.eval.tasks:
        remedy = "Hold data out (data.eval_tokens, or data.eval_path), or remove the key"
        yield run.root.find("train.eval_every").problem(f"{train.eval_every} has no effect, because no data is held out. {remedy}")
    if run.config.sample.prompt != "\n" and not run.config.sample.tokens:
        yield run.root.find("sample.prompt").problem("has no effect, because sample.tokens is 0. Set it, or remove the key")
    if warmup >= run.steps and (train.epochs is None or run.epoch_steps):
        why = f"{warmup} steps are not over when the run ends at step {run.steps}, so the learning rate never reaches optimizer.lr"
        yield run.root.find("optimizer.warmup").problem(f"{why}. Set it below the number of steps")


def batch_problems(run: Run, mesh: Mapping[str, int]) -> Iterator[str]:
    """Messages if the mesh axes that the rules assign to the inputs do not divide batch and sequence, or the loss's chunks the sequence.

    mesh: axis sizes, all of them known; axes that are missing are not checked.
    """
    # The trainer chooses a divisor for null.
    chunks, seq = run.config.train.loss_chunks, run.config.model.seq
    if chunks is not None and seq % chunks:
        # Divisors up to 1000 only, which keeps the message short.
        fits = ", ".join(str(n) for n in range(1, min(seq, 1000) + 1) if seq % n == 0)
        yield f"{run.where('train.loss_chunks')}: train.loss_chunks: {chunks} does not divide model.seq {seq}. These do: {fits}"
    rule = run.rules.match_input("batch/inputs", 2).rule
    if rule is None:
        return
    model, axes = run.config.model, [axis for axis in rule.dims(2)[1] if mesh.get(axis, 1) > 1]
    if isinstance(model, ModelConfig) and model.linear is not None and axes:
        why = f"a token needs the state that all earlier ones have made, but the rules split the sequence over {', '.join(axes)}"
        yield f"{run.where('model.linear')}: model.linear: {why}. Use rules that do not"
    train = run.config.train
    shape = (train.batch // train.accumulate, run.config.model.seq)
    what = f"input batch / accumulate {train.accumulate}" if train.accumulate > 1 else "input batch"
    for dim, problem in rule.misfit_problems(rule.dims(2), shape, mesh, what, label="inputs").items():
        key = ("train.batch", "model.seq")[dim]
        yield f"{run.where(key)}: {key}: {problem}"


def _length_problems(run: Run) -> Iterator[str]:
    """A run with a number of steps and a number of epochs."""
    # The default of steps gives way.
    steps, epochs = run.root.find("train").children.get("steps"), run.config.train.epochs
    if epochs is not None and steps is not None and steps.value is not None:
        remedy = "Remove one of them, or set train.steps=null or train.epochs=null"
        yield run.root.find("train.epochs").problem(f"is {epochs:g}, but train.steps is {steps.value} ({steps.where}). {remedy}")


def _early_problems(run: Run) -> Iterator[str]:
    """An early end by evaluations that a run makes at its end alone."""
    config = run.config
    if config.train.stop_early is not None and not config.train.eval_every and not (config.eval.tasks and config.eval.every):
        yield run.root.find("train.stop_early").problem("needs evaluations while the run trains. Set train.eval_every")


def _stack_problems(run: Run) -> Iterator[str]:
    """A pipeline of a model that has more layers before those of its pipeline than in it."""
    model = run.config.model
    if run.pipeline is None or not isinstance(model, ModelConfig) or model.experts is None:
        return
    dense, others = model.experts.first_dense, model.layers - model.experts.first_dense
    if dense >= others:
        why = f"a pipeline runs the longest stack of layers, but {dense} of {model.layers} layers are dense"
        yield run.root.find("model.experts.first_dense").problem(f"{why}. Use {max(model.layers - 1, 0) // 2} at most")


def _bucket_problems(run: Run) -> Iterator[str]:
    """Keys that need a run directory on a disk."""
    config = run.config
    if config.run.url is None:
        return
    for key in ("sha256", "key"):
        if getattr(config.checkpoint, key):
            yield run.root.find(f"checkpoint.{key}").problem("is for checkpoints in folders, but run.dir is a URL. Remove the key")
    for number, fault in enumerate(config.debug.faults):
        if fault.kind in ("corrupt", "disk_full"):
            yield run.root.find(f"debug.faults[{number}]").problem(f"{fault.kind} is for runs in folders, but run.dir is a URL. Remove it")


def _own_problems(run: Run) -> Iterator[str]:
    """Names of the user's own code that cannot be resolved."""
    names = {key: run.own(key) for key in OWN} | {f"hooks.{hook}.call": config.call for hook, config in run.config.hooks.items()}
    for key, name in names.items():
        problems: list[str] = []
        with InputError.collect(problems):
            if name and (problem := name_problem(name, key, run.code)):
                problems.append(run.root.find(key).problem(problem))
        yield from problems


def _lora_problems(run: Run) -> Iterator[str]:
    """Types that adapters cannot have, or that need them."""
    config = run.config
    if config.lora is not None and config.model.fp8:
        yield run.root.find("lora").problem("adapts matmuls in f32 or bf16, but model.fp8 is true. Set it to false")
    lora = run.root.find("lora")
    # A section with problems of its own is there.
    if (lora.key != "lora" or lora.value is None) and config.model.base_dtype in ("int8", "nf4"):
        why = f"{config.model.base_dtype} packs the matrices of a model that lora: adapts. Add that section, or set bf16"
        yield run.root.find("model.base_dtype").problem(why)


def _further_problems(run: Run) -> Iterator[str]:
    """A prediction of second next tokens beside a loss, adapters or an order of tokens that leave it out."""
    config = run.config
    if isinstance(config.model, OwnModel) or config.model.mtp_rate is None:
        return
    others = {"train.loss": config.train.loss, "lora": config.lora, "data.order": getattr(config.data, "order", "plain") != "plain"}
    for name in (name for name, value in others.items() if value):
        yield run.root.find("model.mtp_rate").problem(f"with {name} no loss of the second next token is computed. Remove one of the two")


def _loss_problems(run: Run) -> Iterator[str]:
    """A loss without the data that it compares, data without such a loss, and keys that the loss does not read."""
    # Another key of the section may be wrong, which is not read then.
    config, node = run.config, run.root.find("train").children.get("loss")
    loss = None if node is None else node.plain()
    if isinstance(loss, str) and loss not in PAIRED and not is_name(loss):
        yield run.root.find("train.loss").problem(
            f"{document.shown(loss)} is neither {' nor '.join(PAIRED)} nor MODULE:NAME, such as my_models:loss"
        )
    if isinstance(config.data, OwnData) and loss is None and not config.data.has_texts:
        yield run.root.find("data.source").problem("data of your own needs a loss of your own. Add train.loss: MODULE:NAME")
    if run.own("data.source") is None and config.data.source == "preferences" and loss is None:
        yield run.root.find("data.source").problem(f"preferences needs a loss of pairs of answers. Add train.loss: {' or '.join(PAIRED)}")
    if run.own("data.source") is None and config.data.source != "preferences" and loss in PAIRED:
        yield run.root.find("train.loss").problem(f"{loss} needs pairs of answers. Set data.source: preferences (docs/finetune.md)")
    for key, other in (("train.loss_chunks", config.train.loss_chunks), ("sample.tokens", config.sample.tokens)):
        if loss not in (None, *PAIRED) and other:
            yield run.root.find(key).problem("belongs to language models without a loss of their own. Remove the key, or train.loss")
    if config.train.beta != TrainConfig.beta and loss not in PAIRED:
        yield run.root.find("train.beta").problem(f"only train.loss: {' and '.join(PAIRED)} read it. Remove the key")
    if config.optimizer.gradients == "bf16" and config.model.dtype == "f32":
        yield run.root.find("optimizer.gradients").problem("bf16 needs model.dtype: bf16. Gradients of f32 matmuls are f32")


def _order_problems(run: Run) -> Iterator[str]:
    """Rows in zigzag order that no attention expects, or that a loss would take for rows in order."""
    data, node = run.config.data, run.root.find("data.order")
    if isinstance(data, OwnData) or data.order != "zigzag":
        return
    axes = sorted({rule.axis for rule in run.rules.contexts})
    if len(axes) != 1:
        found = f"rules split sequences over {' and '.join(axes)}" if axes else "no rule splits a sequence"
        yield node.problem(
            f"zigzag is the order of attention over one axis of the mesh, but {found}. Use rules: jgt:context, or order: plain"
        )
    if run.config.train.loss not in (None, *PAIRED):
        yield node.problem("a loss of your own would see the tokens of a row in another order. Use order: plain")
