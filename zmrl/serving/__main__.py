"""`python -m zmrl.serving MODEL [options]`: serve a model as rollouts are sampled.

Exit codes: 0 after a graceful stop, 2 for bad input, 1 if the engine died.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from zmrl.lora.peft_io import AdapterError
from zmrl.model.checkpoint import CheckpointError
from zmrl.model.config import ConfigError
from zmrl.rollout.engine import quiet_environment
from zmrl.serving.options import OptionError, parse


def main(arguments: Sequence[str] | None = None) -> int:
    quiet_environment()
    try:
        options = parse(arguments)
        from zmrl.serving.server import serve  # imports vLLM: not for a command line that is wrong

        return asyncio.run(serve(options))
    except (OptionError, AdapterError, CheckpointError, ConfigError, OSError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
