"""What sees each operation of torch's while a forward runs."""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """A mode that no compiler of another pack's compiles.

    Where a node has given single blocks to ``torch.compile``, dynamo takes all Python that runs within them for code
    that it is to compile, and so the code that watches them: seconds, and for nothing. torch keeps dynamo away from
    every mode, and imports it for that at the mode's first operation, which takes seconds as well. Here it is kept away
    where it is there.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing ``torch._dynamo``."""
        return False

    def __enter__(self) -> "Operations":
        own = type(self).__torch_dispatch__
        if "torch._dynamo" in sys.modules and not hasattr(own, "_torchdynamo_disable"):
            type(self).__torch_dispatch__ = torch.compiler.disable(own)
        return super().__enter__()
