"""What an engine asks of a runner. Owns the contract, no implementation.

Runners and schedulers are strangers: they meet in ``shared.step`` only. A runner holds tensors
and rows, never policy: it does exactly what a plan says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from shared.step import EncodePlan, EncodeResult, StepPlan, StepResult


class PendingStep(ABC):
    """A step that was launched."""

    @abstractmethod
    def result(self) -> StepResult:
        """Wait for the step and return what it produced. May be called once."""


class DoneStep(PendingStep):
    """A step that is already complete."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class Runner(ABC):
    """Computes steps over the paged KV memory that it was built with.

    ``execute`` is called from one thread; steps take effect in the order of the calls. It returns
    at once where the device allows; at most two steps are pending at a time.
    """

    @abstractmethod
    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch one step. The plan is trusted: ids and positions are the scheduler's duty."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; no step is pending. Calling it twice is safe."""


class EncoderRunner(ABC):
    """Turns prepared media into embedding rows in the ``ec`` arena."""

    @abstractmethod
    def execute(self, plan: EncodePlan) -> EncodeResult:
        """Encode a batch and write its rows; blocks until done. Thread: the encoder's own."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Calling it twice is safe."""
