"""What each rank of a configuration would hold and send, found without running anything."""

from .describe import RankPlan as RankPlan
from .describe import describe as describe
from .request_size import RequestSize as RequestSize
