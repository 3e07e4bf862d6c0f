"""Twenty models as strangers write them, in nnx, linen and plain JAX: no signals, no shardings, names of their own.

Each entry of `FOREIGN` makes (init, loss, batch): init(key) gives the tree of parameters, loss(params, batch) a mean over rows. `by_hand`
is a rules file that a person who knows the model wrote for 8 devices with the axis fsdp, before jgt chose any.
b batch, s sequence, d embed, h hidden, c channels.
"""

import functools
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

ROWS = 16


@dataclass(frozen=True)
class Foreign:
    init: object
    loss: object
    batch: dict
    by_hand: dict


FOREIGN = {}


def foreign(params):
    """Registers make() -> (init, loss, batch) with the specs that a person wrote for its parameters."""

    def add(make):
        def made():
            init, loss, batch = make()
            rules = {"axes": {"batch": ["fsdp"]}, "params": params, "default": "replicate"}
            return Foreign(init=init, loss=loss, batch=batch, by_hand=rules)

        FOREIGN[make.__name__] = functools.cache(made)
        return made

    return add


def wide(batch):
    """The shapes of a batch whose activations outweigh the parameters, as in training."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((512, *x.shape[1:]), x.dtype), batch)


def numbers(*shape):
    return jax.random.normal(jax.random.key(len(shape)), (ROWS, *shape))


def tokens(length, vocab):
    return jax.random.randint(jax.random.key(5), (ROWS, length), 0, vocab)


def linen(module, x, *more):
    """init and apply of a linen module that is called with rows like x."""
    return lambda key: module.init(key, x[:1], *(m[:1] for m in more))["params"], lambda p, *args: module.apply({"params": p}, *args)


def from_nnx(make):
    """init and apply of an nnx module."""
    graph, _, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
    return lambda key: nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)[1], lambda p, *args: nnx.merge(graph, p, rest, copy=True)(*args)


def squared(apply, *keys):
    def loss(params, batch):
        return jnp.mean((apply(params, *(batch[k] for k in keys or ("x",))) - batch["y"]) ** 2)

    return loss


def dense(key, *shape):
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def attend(q, k, v):
    """Attention of [b, s, n, h]."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


# -- linen ---------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    embed: int = 128
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            y = nn.Dense(4 * self.embed)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.embed)(nn.gelu(y))
        return nn.LayerNorm()(x)


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(128, (8, 8), strides=(8, 8), padding="VALID")(x).reshape(x.shape[0], -1, 128)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, 128))
        x = jnp.concatenate([jnp.broadcast_to(cls, (x.shape[0], 1, 128)), x], axis=1)
        x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], 128))
        return nn.Dense(10)(Encoder()(x)[:, 0])


@foreign(
    {
        "{query,key,value}/kernel": ["fsdp", None, None],
        "MultiHeadDotProductAttention_*/out/kernel": [None, None, "fsdp"],
        "Encoder_0/Dense_*/kernel": [None, "fsdp"],
    }
)
def vit():
    x = numbers(32, 32, 3)
    init, apply = linen(ViT(), x)
    return init, squared(apply), {"x": x, "y": numbers(10)}


class Text(nn.Module):
    vocab: int = 1000

    @nn.compact
    def __call__(self, ids):
        return Encoder()(nn.Embed(self.vocab, 128)(ids)).mean(1)


class Clip(nn.Module):
    @nn.compact
    def __call__(self, image, text):
        x = nn.Conv(128, (8, 8), strides=(8, 8))(image).reshape(image.shape[0], -1, 128)
        a = nn.Dense(512, use_bias=False, name="of_image")(Encoder()(x).mean(1))
        b = nn.Dense(512, use_bias=False, name="of_text")(Text()(text))
        a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (a, b))
        return a @ b.T * jnp.exp(self.param("scale", nn.initializers.ones, ()))


@foreign(
    {
        "{query,key,value}/kernel": ["fsdp", None, None],
        "MultiHeadDotProductAttention_*/out/kernel": [None, None, "fsdp"],
        "{Dense_*,of_image,of_text}/kernel": [None, "fsdp"],
        "embedding": ["fsdp", None],
    }
)
def clip():
    image, text = numbers(32, 32, 3), tokens(16, 1000)
    init, apply = linen(Clip(), image, text)

    def loss(params, batch):
        logits = apply(params, batch["image"], batch["text"])
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)) + jnp.diag(jax.nn.log_softmax(logits.T)))

    return init, loss, {"image": image, "text": text}


class DiT(nn.Module):
    """Blocks whose norms are modulated by an embedded time."""

    @nn.compact
    def __call__(self, x, t):
        c = nn.silu(nn.Dense(128)(jnp.cos(t[:, None] * jnp.arange(64.0))))
        x = nn.Dense(128)(x)
        for _ in range(2):
            a, b, g, e, f, h = (m[:, None] for m in jnp.split(nn.Dense(6 * 128)(c), 6, axis=-1))
            y = nn.LayerNorm(use_scale=False, use_bias=False)(x) * (1 + a) + b
            x = x + g * nn.MultiHeadDotProductAttention(num_heads=4)(y)
            y = nn.LayerNorm(use_scale=False, use_bias=False)(x) * (1 + e) + f
            x = x + h * nn.Dense(128)(nn.gelu(nn.Dense(512)(y)))
        return nn.Dense(16)(nn.LayerNorm()(x))


@foreign(
    {"{query,key,value}/kernel": ["fsdp", None, None], "out/kernel": [None, None, "fsdp"], "Dense_{2,3,4,5,6,7}/kernel": ["fsdp", None]}
)
def dit():
    x, t = numbers(16, 16), jnp.linspace(0.0, 1.0, ROWS)
    init, apply = linen(DiT(), x, t)
    return init, squared(apply, "x", "t"), {"x": x, "t": t, "y": numbers(16, 16)}


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(256)(x)
        for _ in range(2):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(y))).swapaxes(1, 2)
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


@foreign({"Dense_{3,7}/kernel": [None, "fsdp"], "Dense_{4,8}/kernel": ["fsdp", None]})
def mixer():
    x = numbers(32, 48)
    init, apply = linen(Mixer(), x)
    return init, squared(apply), {"x": x, "y": numbers(10)}


class ConvNeXt(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(128, (4, 4), strides=(4, 4))(x)
        for _ in range(2):
            y = nn.LayerNorm()(nn.Conv(128, (7, 7), feature_group_count=128)(x))
            x = x + nn.Dense(128)(nn.gelu(nn.Dense(512)(y)))
        return nn.Dense(10)(x.mean((1, 2)))


@foreign({"Dense_{0,2}/kernel": [None, "fsdp"], "Dense_{1,3}/kernel": ["fsdp", None]})
def convnext():
    x = numbers(32, 32, 3)
    init, apply = linen(ConvNeXt(), x)
    return init, squared(apply), {"x": x, "y": numbers(10)}


class LinenLSTM(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(500, 256)(ids)
        return nn.Dense(500)(nn.RNN(nn.OptimizedLSTMCell(256))(x))


@foreign({"embedding": [None, "fsdp"], "{hi,hf,hg,ho,ii,if,ig,io}/kernel": ["fsdp", None], "Dense_0/kernel": ["fsdp", None]})
def linen_lstm():
    ids = tokens(12, 500)
    init, apply = linen(LinenLSTM(), ids)

    def loss(params, batch):
        logits = jax.nn.log_softmax(apply(params, batch["ids"])[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logits, batch["ids"][:, 1:, None], -1))

    return init, loss, {"ids": ids}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        q, k, v = (nn.DenseGeneral((4, 64), name=name)(y) for name in "qkv")
        x = x + nn.DenseGeneral(256, axis=(-2, -1), name="o")(attend(q, k, v))
        return x + nn.Dense(256, name="down")(nn.silu(nn.Dense(1024, name="up")(nn.LayerNorm()(x)))), None


class Stacked(nn.Module):
    """A decoder whose layers are a scan."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(1003, 256)(ids)
        x, _ = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="blocks")(x, None)
        return nn.Dense(1003)(x)


@foreign(
    {
        "embedding": [None, "fsdp"],
        "Dense_0/kernel": ["fsdp", None],
        "{q,k,v}/kernel": ["fsdp", None, None],
        "o/kernel": [None, None, "fsdp"],
        "up/kernel": ["fsdp", None],
        "down/kernel": ["fsdp", None],
    }
)
def stacked():
    ids = tokens(16, 1003)
    init, apply = linen(Stacked(), ids)

    def loss(params, batch):
        logits = jax.nn.log_softmax(apply(params, batch["ids"])[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logits, batch["ids"][:, 1:, None], -1))

    return init, loss, {"ids": ids}


# -- nnx -----------------------------------------------------------------------------------------------------------


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        sizes = [64, 512, 512, 10]
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


@foreign({"layers/1/kernel": [None, "fsdp"]})
def mlp():
    init, apply = from_nnx(NnxMLP)
    return init, squared(apply), {"x": numbers(64), "y": numbers(10)}


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Conv(3, 64, (3, 3), strides=2, rngs=rngs)
        self.b = nnx.Conv(64, 128, (3, 3), strides=2, rngs=rngs)
        self.c = nnx.Conv(128, 128, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(128, num_groups=8, rngs=rngs)
        self.head = nnx.Linear(128 * 64, 10, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.b(jax.nn.relu(self.a(x))))
        x = x + jax.nn.relu(self.norm(self.c(x)))
        return self.head(x.reshape(x.shape[0], -1))


@foreign({"{b,c}/kernel": [None, None, None, "fsdp"], "head/kernel": ["fsdp", None]})
def convnet():
    init, apply = from_nnx(ConvNet)
    return init, squared(apply), {"x": numbers(32, 32, 3), "y": numbers(10)}


class UNet(nnx.Module):
    def __init__(self, rngs):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        self.enter, self.down, self.deep = conv(3, 64), conv(64, 128, strides=2), conv(128, 128)
        self.up = nnx.ConvTranspose(128, 64, (3, 3), strides=2, rngs=rngs)
        self.join, self.leave = conv(128, 64), conv(64, 3)

    def __call__(self, x):
        a = jax.nn.silu(self.enter(x))
        b = jax.nn.silu(self.deep(jax.nn.silu(self.down(a))))
        return self.leave(jax.nn.silu(self.join(jnp.concatenate([a, self.up(b)], axis=-1))))


@foreign({"{down,deep,up,join}/kernel": [None, None, None, "fsdp"]})
def unet():
    init, apply = from_nnx(UNet)
    return init, squared(apply), {"x": numbers(16, 16, 3), "y": numbers(16, 16, 3)}


class NnxLSTM(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(64, 256, rngs=rngs))
        self.head = nnx.Linear(256, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


@foreign({"{hi,hf,hg,ho}/kernel": ["fsdp", None]})
def nnx_lstm():
    init, apply = from_nnx(NnxLSTM)
    return init, squared(apply), {"x": numbers(10, 64), "y": numbers(1)}


class Autoencoder(nnx.Module):
    def __init__(self, rngs):
        self.encode = nnx.Linear(784, 400, rngs=rngs)
        self.squeeze, self.widen = nnx.Linear(400, 20, rngs=rngs), nnx.Linear(20, 400, rngs=rngs)
        self.decode = nnx.Linear(400, 784, rngs=rngs)

    def __call__(self, x):
        return self.decode(jax.nn.relu(self.widen(self.squeeze(jax.nn.relu(self.encode(x))))))


@foreign({"encode/kernel": ["fsdp", None], "decode/kernel": [None, "fsdp"]})
def autoencoder():
    init, apply = from_nnx(Autoencoder)
    return init, squared(apply), {"x": numbers(784), "y": numbers(784)}


# -- plain JAX -----------------------------------------------------------------------------------------------------


@foreign({"{B,C}_*": [None, "fsdp"], "mix": [None, "fsdp"]})
def s5():
    """Two stacked diagonal state space layers, over the sequence by an associative scan."""
    d, n = 256, 512

    def init(key):
        keys = iter(jax.random.split(key, 5))
        part = {"B_re": dense(next(keys), 2, d, n), "B_im": dense(next(keys), 2, d, n)}
        part |= {"C_re": dense(next(keys), 2, n, d), "C_im": dense(next(keys), 2, n, d), "mix": dense(next(keys), 2, d, d)}
        return part | {"decay": jnp.full((2, n), -0.5), "turn": jnp.tile(jnp.linspace(0.0, 3.0, n), (2, 1)), "D": jnp.ones((2, d))}

    def layer(x, p):
        rate = jnp.exp(p["decay"] + 1j * p["turn"])
        u = x @ (p["B_re"] + 1j * p["B_im"])
        steps = (jnp.broadcast_to(rate, u.shape), u)
        _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), steps, axis=1)
        y = (states @ (p["C_re"] + 1j * p["C_im"])).real + x * p["D"]
        return x + jax.nn.gelu(y) @ p["mix"], None

    def apply(params, x):
        return jax.lax.scan(layer, x, params)[0].mean(1)

    return init, squared(apply), {"x": numbers(16, d), "y": numbers(d)}


@foreign({"w": ["fsdp", None, None], "out": ["fsdp", None]})
def gat():
    """Graph attention with four heads, over batches of small graphs."""

    def init(key):
        keys = jax.random.split(key, 4)
        layer = {"w": dense(keys[0], 256, 4, 64), "a": dense(keys[1], 4, 64, 2)}
        return {"first": layer, "second": {**layer, "w": dense(keys[2], 256, 4, 64)}, "out": dense(keys[3], 256, 256)}

    def layer(p, x, edges):
        z = jnp.einsum("bnd,dkh->bnkh", x, p["w"])
        source, target = jnp.moveaxis(jnp.einsum("bnkh,kha->bnka", z, p["a"]), -1, 0)
        scores = jax.nn.leaky_relu(source[:, :, None] + target[:, None])
        scores = jax.nn.softmax(jnp.where(edges[..., None], scores, -1e9), axis=2)
        return jax.nn.elu(jnp.einsum("bnmk,bmkh->bnkh", scores, z)).reshape(x.shape)

    def apply(params, x, edges):
        for name in ("first", "second"):
            x = layer(params[name], x, edges)
        return x.mean(1) @ params["out"]

    edges = (numbers(12, 12) > 0) | jnp.eye(12, dtype=bool)
    return init, squared(apply, "x", "edges"), {"x": numbers(12, 256), "edges": edges, "y": numbers(256)}


@foreign(
    {"table": ["fsdp", None], "qkv": ["fsdp", None, None, None], "o": [None, None, "fsdp"], "up": [None, "fsdp"], "down": ["fsdp", None]}
)
def gpt():
    """A decoder with a tied table and a list of blocks."""
    d, v = 128, 2048

    def init(key):
        keys = iter(jax.random.split(key, 9))
        block = lambda: {  # noqa: E731
            "qkv": dense(next(keys), d, 3, 4, 32) * d**-0.5,
            "o": dense(next(keys), 4, 32, d),
            "up": dense(next(keys), d, 4 * d),
            "down": dense(next(keys), 4 * d, d),
        }
        return {"table": dense(next(keys), v, d), "blocks": [block(), block()]}

    def loss(params, batch):
        x = params["table"][batch["ids"]]
        for block in params["blocks"]:
            q, k, v = jnp.moveaxis(jnp.einsum("bsd,dtnh->bstnh", x, block["qkv"]), 2, 0)
            x = x + jnp.einsum("bsnh,nhd->bsd", attend(q, k, v), block["o"])
            x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
        logits = jax.nn.log_softmax(x[:, :-1] @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, batch["ids"][:, 1:, None], -1))

    return init, loss, {"ids": tokens(16, 2048)}


@foreign({"tables/*": [None, "fsdp"], "top/0": ["fsdp", None]})
def recommender():
    """Three tables of features, and a network on their products."""

    def init(key):
        keys = jax.random.split(key, 5)
        tables = {name: dense(k, n, 64) for name, k, n in zip("abc", keys[:3], (1001, 2003, 5001), strict=True)}
        return {"tables": tables, "top": [dense(keys[3], 192, 512), dense(keys[4], 512, 1)]}

    def apply(params, ids):
        x = jnp.concatenate([params["tables"][name][ids[:, n]] for n, name in enumerate("abc")], axis=-1)
        return jax.nn.relu(x @ params["top"][0]) @ params["top"][1]

    return init, squared(apply, "ids"), {"ids": tokens(3, 1000), "y": numbers(1)}


@foreign({"kernels": [None, None, "fsdp"], "enter": [None, "fsdp"]})
def wavenet():
    """A stack of gated causal convolutions under a scan that recomputes."""

    def init(key):
        keys = jax.random.split(key, 2)
        return {"kernels": dense(keys[0], 4, 3, 128, 256) * 3**-0.5, "enter": dense(keys[1], 16, 128), "bias": jnp.zeros((4, 256))}

    def layer(x, p):
        y = jax.lax.conv_general_dilated(x, p["kernels"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")) + p["bias"]
        a, b = jnp.split(y, 2, axis=-1)
        return x + jnp.tanh(a) * jax.nn.sigmoid(b), None

    def apply(params, x):
        stack = {name: params[name] for name in ("kernels", "bias")}
        return jax.lax.scan(jax.checkpoint(layer), x @ params["enter"], stack)[0].mean(1)

    return init, squared(apply), {"x": numbers(20, 16), "y": numbers(128)}


@foreign({"experts/*": [None, None, "fsdp"], "gate": []})
def mixture():
    """All experts on all rows, weighted by a softmax."""

    def init(key):
        keys = jax.random.split(key, 3)
        return {"experts": {"up": dense(keys[0], 4, 128, 256), "down": dense(keys[1], 4, 256, 128)}, "gate": dense(keys[2], 128, 4)}

    def apply(params, x):
        hidden = jax.nn.relu(jnp.einsum("bd,edh->beh", x, params["experts"]["up"]))
        out = jnp.einsum("beh,ehd->bed", hidden, params["experts"]["down"])
        return jnp.einsum("bed,be->bd", out, jax.nn.softmax(x @ params["gate"]))

    return init, squared(apply), {"x": numbers(128), "y": numbers(128)}


@foreign({"w_*": ["fsdp", None], "v_2": [None, "fsdp"]})
def field():
    """A radiance field: coordinates, sines, a deep network with a skip."""

    def init(key):
        keys = jax.random.split(key, 4)
        sizes = [(60, 256), (256, 256), (316, 256), (256, 4)]
        return {
            f"{'w' if a % 8 == 0 and b > 4 else 'v'}_{n}": dense(k, a, b) for n, (k, (a, b)) in enumerate(zip(keys, sizes, strict=True))
        }

    def apply(params, x):
        angles = x[..., None] * 2.0 ** jnp.arange(10)
        x = enter = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*x.shape[:-1], -1)
        for n, name in enumerate(sorted(params, key=lambda name: name[2:])):
            x = (jax.nn.relu if n < 3 else lambda y: y)((jnp.concatenate([x, enter], -1) if n == 2 else x) @ params[name])
        return x.mean(1)

    return init, squared(apply), {"x": numbers(32, 3), "y": numbers(4)}


@foreign({"latents": [], "{q,k,v,o}": [None, "fsdp"], "{up,down}": [None, "fsdp"]})
def perceiver():
    """Learned latents that read a long input several times with the same weights."""

    def init(key):
        keys = iter(jax.random.split(key, 7))
        part = {name: dense(next(keys), 256, 256) for name in "qkvo"}
        return part | {"up": dense(next(keys), 256, 512), "down": dense(next(keys), 512, 256), "latents": dense(next(keys), 8, 256)}

    def apply(p, x):
        def read(z, _):
            q, k, v = ((y @ p[name]).reshape(*y.shape[:2], 4, 64) for y, name in ((z, "q"), (x, "k"), (x, "v")))
            z = z + attend(q, k, v).reshape(z.shape) @ p["o"]
            return z + jax.nn.relu(z @ p["up"]) @ p["down"], None

        z = jnp.broadcast_to(p["latents"], (x.shape[0], 8, 256))
        return jax.lax.scan(read, z, None, length=3)[0].mean(1)

    return init, squared(apply), {"x": numbers(64, 256), "y": numbers(256)}


# -- other libraries, where they are installed ----------------------------------------------------------------------

if find_spec("equinox"):

    @foreign({"layers/1/weight": ["fsdp", None]})
    def equinox_mlp():
        equinox = import_module("equinox")

        def loss(model, batch):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        return lambda key: equinox.nn.MLP(64, 10, 512, 2, key=key), loss, {"x": numbers(64), "y": numbers(10)}


if find_spec("haiku"):

    @foreign({"linear_1/w": ["fsdp", None]})
    def haiku_mlp():
        haiku = import_module("haiku")
        net = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([512, 512, 10])(x)))
        x = numbers(64)
        return lambda key: net.init(key, x), squared(net.apply), {"x": x, "y": numbers(10)}
