"""What each rank of a configuration would hold and send, found without running anything."""

from .describe import RankPlan, describe

__all__ = ["RankPlan", "describe"]
