"""The states and steps of the reference contract."""

from tenure.core.state import Machine

MACHINE = Machine(
    contract="memory",
    initial=("waiting",),
    running=("running",),
    final=("done", "failed", "cancelled"),
    cancelled=("cancelled",),
    steps={
        "waiting": ("running", "failed", "cancelled"),
        "running": ("waiting", "done", "failed", "cancelled"),
    },
    reopen={"done": ("waiting",), "failed": ("waiting",), "cancelled": ("waiting",)},
)
