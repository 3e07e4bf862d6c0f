"""Functions whose programs hold one equation with programs inside, one for each kind of equation."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from next_checkpoint import Base, next_checkpoint

import jgt
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.tracing import evaluate, trace

X = jnp.float32(0.5)


def only(program, *, having):
    """The only equation with this primitive, or with this key in its params."""
    found = [e for e in jx.body(program).eqns if (e.primitive.name == having or having in e.params)]
    assert len(found) == 1
    return found[0]


def scanned(x):
    return jax.lax.scan(lambda h, w: (jnp.sin(h) * w, h), x, jnp.ones((3,), x.dtype))


def with_jvp():
    fn = jax.custom_jvp(lambda x: jnp.sin(x))
    fn.defjvp(lambda primals, tangents: (fn(*primals), jnp.cos(primals[0]) * tangents[0]))
    return fn


def with_vjp():
    fn = jax.custom_vjp(lambda x: jnp.sin(x))
    fn.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,))
    return fn


def next_remat(x):
    with next_checkpoint():
        return jax.checkpoint(jnp.sin)(x)


class Doubled(Base):
    """A primitive that is an object with a program in it, and twice the derivative of that program."""

    def __init__(self, jaxpr):
        self.in_avals, self.out_aval = tuple(v.aval for v in jx.body(jaxpr).invars), jx.body(jaxpr).outvars[0].aval
        self.params = {"jaxpr": jaxpr}
        super().__init__()

    def expand(self, x):
        return evaluate(self.jaxpr, [x])[0]

    def vjp_fwd(self, is_real, x):
        return self(x), x

    def vjp_bwd_retval(self, x, g):
        return (2 * jax.vjp(self.expand, x)[1](g)[0],)


def hijax(x):
    return Doubled(jax.make_jaxpr(jnp.sin)(x))(x)


def sharded_map(x):
    return jax.shard_map(jnp.sin, mesh=jgt.make_mesh({"data": 8}), in_specs=P(), out_specs=P())(x)


# Each: a function whose program holds one equation with programs inside, and how many of them.
NESTING = {
    "jit": (jax.jit(jnp.sin), 1),
    "scan": (scanned, 1),
    "while": (lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)), 2),
    "cond": (lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 2),
    "remat": (jax.checkpoint(jnp.sin), 1),
    "next remat": (next_remat, 1),
    "hijax": (hijax, 1),
    "custom_jvp": (with_jvp(), 1),
    "custom_vjp": (with_vjp(), 1),
    "shard_map": (sharded_map, 1),
}


def nesting_equation(fn):
    program, _ = trace(fn, X)
    (equation,) = [e for e in jx.body(program).eqns if list(subprograms(e))]
    return program, equation
