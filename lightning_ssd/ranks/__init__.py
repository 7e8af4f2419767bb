"""The ranks of one host that train one model: one copy of its states in shared memory, and messages about it.

- `ranks`: `Ranks`, a rank's memory, messages and collectives, and the end of a training after a failure of any rank.
- `rank_memory`: host memory that all ranks map.
- `peer_memory`: device memory that all ranks read.
- `messages`: messages between ranks, futures of them, and the end of a rank.

Ranks change each other's view of shared memory by messages alone: a rank writes bytes, then posts a message about
them, and others read the bytes once they have the message. The kernel orders both, on every processor, so that there
are no words in shared memory whose stores and loads need an order. A thread that sleeps in `select` receives messages;
nothing polls. The same sockets tell of a rank's death, at once: the kernel closes them.
"""

from lightning_ssd.ranks.messages import RankError, RankMessages, Topic
from lightning_ssd.ranks.peer_memory import PeerMemory
from lightning_ssd.ranks.rank_memory import RankMemory
from lightning_ssd.ranks.ranks import Ranks
