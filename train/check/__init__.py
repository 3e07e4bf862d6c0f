"""`jgt check --config FILE`: rules against mesh and shapes, in seconds, with no devices."""
