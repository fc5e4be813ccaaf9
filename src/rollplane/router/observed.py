"""How well placement knows the caches: prompt tokens expected to be cached, and those that were."""


class Observed:
    """Sums over answers whose worker said how many prompt tokens it read from its cache."""

    def __init__(self) -> None:
        self.answers = 0
        self.predicted_tokens = 0
        self.cached_tokens = 0
        self.over_tokens = 0
        """Expected and not cached."""
        self.under_tokens = 0
        """Cached and not expected."""

    def __repr__(self) -> str:
        return (
            f"<Observed {self.answers} answers, predicted {self.predicted_tokens} tokens, cached {self.cached_tokens}, "
            f"over {self.over_tokens}, under {self.under_tokens}>"
        )

    def add(self, *, predicted: int | None, cached: int | None) -> None:
        """One answer; None: the placement had no idea, or the worker does not say."""
        if predicted is None or cached is None:
            return
        self.answers += 1
        self.predicted_tokens += predicted
        self.cached_tokens += cached
        self.over_tokens += max(predicted - cached, 0)
        self.under_tokens += max(cached - predicted, 0)

    def include(self, other: "Observed") -> None:
        """Add another's sums."""
        self.answers += other.answers
        self.predicted_tokens += other.predicted_tokens
        self.cached_tokens += other.cached_tokens
        self.over_tokens += other.over_tokens
        self.under_tokens += other.under_tokens
