"""What a deployment will cost: per hour, and per million output tokens if the instance was measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from peagle.cost import CostOptions, cost_lines, cost_of, hourly_lines
from peagle.errors import ConfigError
from peagle.sagemaker.plan import Deployment
from peagle.targets.prices import known_prices


@dataclass(frozen=True)
class DeploymentCost(CostOptions):
    """Cost, shown by --dry-run."""

    measured: Path | None = None
    """JSON of `peagle bench` or `peagle bench serve` on such an instance: adds the price per million output tokens"""


def lines_of(deployment: Deployment, options: DeploymentCost) -> list[str]:
    """The cost of a deployment, one sentence a line. Refuses a measurement of another GPU."""
    instance, measured = deployment.instance, options.measured
    if options.price_per_hour is None and measured is None and instance not in known_prices():
        return [f"cost: no price of {instance} is known; --price-per-hour adds it"]
    price = options.price(instance)
    assert price is not None  # an unknown instance without a price was refused
    lines = hourly_lines(price, deployment.num_instances, deployment.max_instances)
    if measured is None:
        return lines
    try:
        document = json.loads(measured.expanduser().read_text(encoding="utf-8"))
        is_client = "base_url" in document  # the client's hardware says nothing about the server's
        accelerator = document["provenance"]["hardware"]["accelerator"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--measured {measured} is not a result of `peagle bench`: {error}", hint="write one with --json > FILE"
        ) from error
    if not is_client:
        price.check(accelerator)
    return lines + cost_lines(cost_of(document, price, options))
