"""Keep the streams of a pass as a rank does."""

from __future__ import annotations

from checkpointless.state.rng import RngStates


class Starts:
    """Keeps the streams of a pass as bytes, as a board does."""

    kept = b""

    def keep_data_start(self, streams: RngStates) -> None:
        """Keep them."""
        self.kept = streams.to_bytes()

    def data_start(self) -> RngStates | None:
        """Return the streams that were kept."""
        return RngStates.from_bytes(self.kept) if self.kept else None
