"""From a target to a gated drafter and a report: the plan of a build, its stages, and what became of them."""
