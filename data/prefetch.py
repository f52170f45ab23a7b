"""Batches read ahead in a thread, so that a training step never waits for the disk."""

from concurrent.futures import Future, ThreadPoolExecutor

from outrider.data.batches import Batch, Batches

Place = tuple[int, int, int, int]


class Prefetched:
    """The same batches as `batches`: what follows the batch asked for is being read already.

    A batch is a pure function of its place, so a wrong guess costs time and nothing else.
    """

    def __init__(self, batches: Batches, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; read at least 1 batch ahead")
        self.batches = batches
        self.depth = depth
        self._ahead: dict[Place, Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def epoch_length(self) -> int:
        """Global batches in an epoch."""
        return self.batches.epoch_length()

    def batch(self, epoch: int, index: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's part of global batch `index`."""
        places = [(epoch, index, rank, world)]
        for _ in range(self.depth):
            places.append(self._after(places[-1]))
        kept = {place: self._ahead[place] for place in places if place in self._ahead}
        for place, future in self._ahead.items():
            if place not in kept:
                future.cancel()
        for place in places:
            kept.setdefault(place, self._thread.submit(self._read, place))
        found = kept.pop(places[0])
        self._ahead = kept
        return found.result()

    def _read(self, place: Place) -> Batch:
        return self.batches.batch(*place)

    def _after(self, place: Place) -> Place:
        epoch, index, rank, world = place
        is_last = index + 1 >= self.epoch_length()
        return (epoch + is_last, 0 if is_last else index + 1, rank, world)
