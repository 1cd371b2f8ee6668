"""What a million output tokens cost, of the recommended setting and of all that were measured."""

from dataclasses import dataclass
from typing import Any

from peagle.cost import MeasuredCost, cost_lines, dollars, usd_per_million


@dataclass(frozen=True)
class MachinePrice:
    """Cost. Needs a price: of an instance, or per hour."""

    price_per_hour: float | None = None
    """price of this machine in US dollars; default: that of the instance in peagle's dated list"""
    instance: str | None = None
    """instance type that this machine is, for example ml.p5.4xlarge: its price per GPU is used"""
    training_hours: float | None = None
    """hours it took to train the drafter, at the same price: adds its cost and when that is earned back"""

    @property
    def cost(self) -> MeasuredCost:
        """Without a limit on the time per token: the recommendation is the cheapest setting within --max-tpot."""
        return MeasuredCost(self.price_per_hour, None, self.training_hours, self.instance)


def priced(document: dict[str, Any]) -> list[str]:
    """The cost of the recommended setting and of all that were measured; nothing without a price."""
    tuned, cost = document["tuned"], document["cost"]
    if cost is None:
        return []
    speed, where = tuned["expected"]["output_tokens_per_second"], f"{tuned['expected']['concurrency']:g}"
    usd = dollars(usd_per_million(cost["price"]["charged_usd_per_hour"], speed))
    price, *others = cost_lines(cost)
    return [price, f"recommended setting at concurrency {where}: {usd} per million output tokens", *others]
