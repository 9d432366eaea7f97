"""What a run would hold where and how fast it would be; pure arithmetic.

A `RuntimeConfig` says what is asked for, a `MachineProfile` of which machine, and `MemoryLimits` what may be taken of
it. `sizes` adds up what a run holds, `search` places it: `plan_run` (or `find_plan`, on a machine that is here) gives a
`RunPlan`. `cost` says how long it takes, and `report` what that means and what would fit where a run does not. Layers,
caches and runners say how large they are; this room reads no weights, and knows neither the engine nor who proposes.
"""
