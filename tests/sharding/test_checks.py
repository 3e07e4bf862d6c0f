"""Arguments of the wrong type are answered with what to pass instead."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jgt

MESH = jgt.make_mesh({"data": 2, "tensor": 4})
RULES = jgt.make_rules({"params": {"w": [None, "tensor"]}, "default": "replicate"})
PARAMS, X = {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))


def loss(params, x):
    return jnp.sum(x @ params["w"])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: jgt.shard(loss, RULES, {"data": 2}), r"mesh must be a mesh, not dict; make it with jgt.make_mesh\({'data': 2}\)"),
        (lambda: jgt.shard(loss, RULES, 8), "mesh must be a mesh, not 8; make it with jgt.make_mesh"),
        (lambda: jgt.shard(loss, MESH, RULES), r"rules must be .* not Mesh. Rules and mesh are swapped: the order is \(fn, rules, mesh\)"),
        (lambda: jgt.shard(loss, 3, MESH), "rules must be jgt.Rules, the path of a rules file, or a mapping, not 3"),
        (lambda: jgt.shard(3, RULES, MESH), "fn must be a function, not 3"),
        (lambda: jgt.shard(nn.Dense(8), RULES, MESH), "a linen module .* such as model.apply"),
        (lambda: jgt.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), RULES, MESH), "an nnx module .* such as lambda model, x"),
        (lambda: jgt.shard(loss, RULES, MESH)(nn.Dense(8), X), "the first argument must hold the parameters, .* contains Dense"),
        (lambda: jgt.shard(loss, RULES, MESH)(3, X), "the first argument must hold the parameters, .* contains int"),
        (
            lambda: jgt.shard(loss, RULES, MESH, pipeline={"signal": "layers", "microbatches": 2}),
            "pipeline must be a jgt.Pipeline, not dict; write jgt.Pipeline",
        ),
        (lambda: jgt.place(loss, RULES, {"data": 2}, PARAMS, X), "mesh must be a mesh"),
        (lambda: jgt.init(lambda: PARAMS, RULES, MESH, loss=loss, batch=X, optimizer="adam"), "optimizer must be an optax transformation"),
        (lambda: jgt.plan(loss, PARAMS, X, rules=3), "rules must be"),
        (lambda: jgt.make_mesh([2, 4]), r"sizes must be a mapping of axis names to sizes, .* not \[2, 4\]"),
        (lambda: jgt.make_mesh("data"), "sizes must be a mapping"),
        (lambda: jgt.make_mesh({"data": 2.0}), "'data': 2.0 is not an axis of a mesh. Write a name and a whole number"),
        (lambda: jgt.abstract_mesh({"data": True}), "'data': True is not an axis of a mesh"),
    ],
)
def test_a_wrong_type(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_a_misspelt_name():
    with pytest.raises(AttributeError, match=r"module 'jgt' has no attribute 'shrad'. Did you mean 'shard'\?"):
        _ = jgt.shrad


def test_rules_may_be_a_path_or_a_mapping(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("params: {w: [null, tensor]}\ndefault: replicate\n")
    mapping = {"params": {"w": [None, "tensor"]}, "default": "replicate"}
    for rules in (path, str(path), mapping):
        assert jgt.place(loss, rules, MESH, PARAMS, X).rules == RULES
        sharded = jgt.shard(loss, rules, MESH)
        assert jgt.place(sharded, RULES, MESH, PARAMS, X) == sharded.placement(PARAMS, X)
    with pytest.raises(jgt.InputError, match=r"rule\.yaml: cannot be read: No such file"):
        jgt.shard(loss, tmp_path / "rule.yaml", MESH)


def test_a_spec_of_jax_is_a_spec():
    assert jgt.make_rules({"params": {"w": P(None, "tensor")}, "inputs": P(("data", "tensor"))}) == jgt.make_rules(
        {"params": {"w": [None, "tensor", ...]}, "inputs": [["data", "tensor"], ...]}
    )
    assert jgt.place(loss, {"params": {"w": P("tensor")}}, MESH, PARAMS, X).params["w"].spec == P("tensor", None)


def test_a_placement_prints_as_a_table():
    def fn(params, x):
        with jgt.signal.context("mlp"):
            return jnp.sum(x @ params["w"]) + params["bias"]

    params = {"w": jnp.ones((8, 8)), "bias": jnp.ones(())}
    assert str(jgt.place(fn, RULES, MESH, params, X)).splitlines() == [
        "parameter  shape   spec            signals",
        "bias       []      []              mlp",
        "w          [8, 8]  [null, tensor]  mlp",
    ]


def test_another_explicit_mesh_around_a_call_is_refused():
    explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharded = jgt.shard(loss, RULES, MESH)
    said = r"the mesh around this call \(jax.set_mesh\) has Explicit axes data=8, and the rules are for a mesh of data=2, tensor=4"
    with jax.set_mesh(explicit), pytest.raises(ValueError, match=said):
        jax.jit(sharded)(PARAMS, X)
    on_mesh = jax.device_put(X, jax.NamedSharding(explicit, P("data")))
    with pytest.raises(ValueError, match=r"the mesh of an argument has Explicit axes data=8, .* Move the argument first"):
        sharded(PARAMS, on_mesh)
    with jax.set_mesh(MESH):
        assert jax.jit(sharded)(PARAMS, X) == 8**3


# -- programs that need care ---------------------------------------------------------------------------------------


def test_leaves_that_are_no_arrays_are_constants_of_the_program():
    params = {"w": PARAMS["w"], "rate": 0.5, "name": "relu", "act": jax.nn.relu}
    fn = lambda params, x: params["rate"] * jnp.sum(params["act"](x @ params["w"]))  # noqa: E731
    sharded = jgt.shard(fn, RULES, MESH)
    placement = sharded.placement(params, X)
    assert placement.params == {"w": placement.params["w"], "rate": None, "name": None, "act": None}
    assert [p.path for p in placement.parameters] == ["w"]
    assert sharded(params, X) == 0.5 * 8**3
    assert sharded(params | {"rate": 2}, X) == 2 * 8**3


def test_complex_values_that_leave_a_signal_are_laid_out():
    def fn(params, x):
        with jgt.signal.context("fft"):
            y = jnp.exp(1j * (x @ params["w"]))
        return jnp.sum(jnp.abs(y))

    rules = jgt.make_rules({"signals": {"fft": {"out": ["data", "tensor"]}}, "default": "replicate"})
    sharded = jgt.shard(fn, rules, MESH)
    assert "complex<f32>" in jax.jit(sharded).lower(PARAMS, X).as_text()
    assert jax.jit(sharded)(PARAMS, X) == pytest.approx(64)


def test_a_symbolic_batch_needs_a_constraint_that_says_what_divides_it():
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})

    def export(*constraints):
        (size,) = jax.export.symbolic_shape("b", constraints=constraints)
        return jax.export.export(jax.jit(jgt.shard(loss, rules, MESH)))(PARAMS, jax.ShapeDtypeStruct((size, 8), jnp.float32))

    with pytest.raises(jgt.InputError, match=r"has the symbolic size b, and nothing says that data=2 divides it. .*'mod\(b, 2\) == 0'"):
        export()
    assert export("mod(b, 2) == 0").nr_devices == 8


def test_a_named_tensor_of_symbolic_size_is_laid_out():
    def fn(params, x):
        with jgt.signal.context("mlp"):
            hidden = jgt.signal.tensor(jnp.tanh(x @ params["w"]), "hidden")
        return hidden - hidden.mean(0, keepdims=True)

    rules = jgt.make_rules({"signals": {"mlp": {"tensors": {"hidden": [None, "tensor"]}}}, "default": "replicate"})
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8"), jnp.float32)
    exported = jax.export.export(jax.jit(jgt.shard(fn, rules, MESH)))(PARAMS, shape)
    for rows in (1, 3):
        x = jnp.arange(rows * 8.0).reshape(rows, 8) / 8
        called = jax.jit(exported.call, in_shardings=jax.NamedSharding(MESH, P()))(PARAMS, x)
        assert jnp.max(jnp.abs(called - fn(PARAMS, x))) < 1e-6


def test_parameters_that_only_a_kernel_reads_are_found():
    pl = pytest.importorskip("jax.experimental.pallas")

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] * w_ref[...]

    def fn(params, x):
        with jgt.signal.context("scale"):
            call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
            return jnp.sum(call(x, params["w"]))

    rules = jgt.make_rules({"signals": {"scale": {"params": {"w": ["tensor", None]}}}})
    (place,) = jgt.place(fn, rules, MESH, PARAMS, X).parameters
    assert (place.signals, place.spec) == (("scale",), "[tensor, null]")
    assert jax.jit(jgt.shard(fn, rules, MESH))(PARAMS, X) == 64


def test_a_misspelt_parameter_gets_the_nearest_name_and_the_list():
    def fn(params, x):
        with jgt.signal.context("mlp"):
            return jnp.sum(x @ params["up"]["kernel"] @ params["down"]["kernel"])

    params = {"up": {"kernel": X}, "down": {"kernel": X}}
    rules = jgt.make_rules({"signals": {"mlp": {"params": {"down/kernl": [None, None]}}}, "params": {"zzz": []}, "default": "replicate"})
    with pytest.raises(jgt.InputError) as caught:
        jgt.place(fn, rules, MESH, params, X)
    listed = "Its parameters: down/kernel, up/kernel. Remove the rule or correct its name"
    assert caught.value.problems == (
        f"rules: mlp: params: down/kernl: no parameter used below this signal matches. Did you mean 'down/kernel'? {listed}",
        f"rules: params: zzz: no parameter matches. {listed}",
    )


# -- rules by rank, and optimizer state of another rank ------------------------------------------------------------


def test_parameters_of_one_name_may_have_a_rule_for_each_rank():
    def fn(params, x):
        with jgt.signal.context("net"):
            y = jax.lax.conv(x, params["conv"]["kernel"], (1, 1), "SAME")
            return jnp.sum(y.mean((2, 3)) @ params["dense"]["kernel"])

    params = {"conv": {"kernel": jnp.ones((8, 4, 3, 3))}, "dense": {"kernel": jnp.ones((8, 8))}}
    image = jnp.ones((2, 4, 8, 8))

    def specs(**patterns):
        rules = jgt.make_rules({"signals": {"net": {"params": patterns}}})
        return {p.path: p.spec for p in jgt.place(fn, rules, MESH, params, image).parameters}

    by_rank = {"kernel": [None, "tensor"], "**/kernel": ["tensor", None, None, None]}
    expected = {"conv/kernel": "[tensor, null, null, null]", "dense/kernel": "[null, tensor]"}
    assert specs(**by_rank) == specs(**dict(reversed(by_rank.items()))) == expected
    with pytest.raises(jgt.InputError, match=r"net: params: \*/kernel: no parameter used below this signal matches that the spec fits"):
        specs(**by_rank, **{"*/kernel": [None]})
    with pytest.raises(jgt.InputError, match=r"kernel: the spec has 2 dims, but the parameter conv/kernel has 4"):
        specs(kernel=[None, "tensor"])


def test_the_memory_of_l_bfgs_is_sharded_like_its_parameter():
    optimizer = optax.lbfgs(memory_size=3)
    _, state = jgt.init(lambda: {"w": X, "bias": jnp.ones(8)}, RULES, MESH, loss=loss, batch=X, optimizer=optimizer)
    memory = [x for path, x in jax.tree.leaves_with_path(state) if x.shape == (3, 8, 8)]
    assert len(memory) == 2
    assert all(x.sharding.spec == P(None, None, "tensor") for x in memory)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state) if x.shape in ((), (3,), (3, 8)))
