"""Synthetic traces in the form that XLA's profilers write."""

from jax.profiler import ProfileData


def plane(name, lines):
    """A plane in the text form of an XSpace; lines: name → (event, start ns, duration ns, stats)."""
    events, stats, body = {}, {}, []
    for line, rows in lines.items():
        parts = []
        for event, start, duration, values in rows:
            number = events.setdefault(event, len(events) + 1)
            fields = " ".join(
                f"stats {{ metadata_id: {stats.setdefault(key, len(stats) + 1)} "
                f"{'str_value' if isinstance(value, str) else 'int64_value'}: {quoted(value)} }}"
                for key, value in values.items()
            )
            parts.append(f"events {{ metadata_id: {number} offset_ps: {start * 1000} duration_ps: {duration * 1000} {fields} }}")
        body.append(f'lines {{ name: "{line}" {" ".join(parts)} }}')
    names = [
        f'{kind}_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for kind, found in (("event", events), ("stat", stats))
        for name, i in found.items()
    ]
    return f'planes {{ name: "{name}" {" ".join([*names, *body])} }}'


def quoted(value):
    return f'"{value}"' if isinstance(value, str) else value


def planes(*texts):
    """The planes as jaxlib's reader of a trace returns them."""
    return list(ProfileData.from_text_proto("\n".join(texts)).planes)


def op(name, **stats):
    """The stats of an instruction of the program."""
    return {"hlo_module": "jit_step", "hlo_op": name, **stats}
