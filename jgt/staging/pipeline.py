"""`jgt.Pipeline`: the options of a pipeline, and how it puts a call into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from jgt.pipeline.config import PipelineConfig
from jgt.replacements.replacement import ParameterPlace, Replacement
from jgt.rules import Rules
from jgt.sharding.arguments import Arguments, Traced
from jgt.sharding.placement import Surroundings
from jgt.sharding.staged import StagedCall
from jgt.staging.staging import staged_call


@dataclass(frozen=True, kw_only=True)
class Pipeline(PipelineConfig):
    __doc__ = PipelineConfig.__doc__

    @classmethod
    def of(cls, options: PipelineConfig | None) -> Pipeline | None:
        """The pipeline with the options of a run's file; None without options."""
        if options is None:
            return None
        new = cls(**{field.name: getattr(options, field.name) for field in fields(options) if field.init})
        return new._changed(lines=options.lines, gradients=options.gradients, parts=options.parts)

    def stage(
        self,
        arguments: Arguments,
        traced: Traced,
        rules: Rules,
        site: Surroundings,
        replacements: Sequence[Replacement],
        parameters: tuple[ParameterPlace, ...],
    ) -> StagedCall:
        """Puts a call with this trace into the pipeline. Raises ValueError inside a shard_map, or a vmap that does not split the batch."""
        return staged_call(arguments, traced, self, rules, site, replacements, parameters)
