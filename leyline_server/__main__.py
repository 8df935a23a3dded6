"""`leyline-server`: reads settings, loads the model, serves until Ctrl-C, drains."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING

from leyline_server.listening import refused

if TYPE_CHECKING:
    from rich.console import Console

    from leyline_server.config import ServerConfig

_PROGRAM = "leyline-server"


def main() -> None:
    """The entry point. Exit status 2 for bad settings, 3 for a model that is refused, 1 for a crash."""
    try:
        from rich.console import Console
        from rich.logging import RichHandler

        from leyline_server.config import SettingsError, load_config
        from leyline_server.terminal import complain
    except ModuleNotFoundError as error:  # the SDK's installation has this entry point too
        print(
            f"leyline-server: {error}: the server's packages are not installed; in a checkout: "
            'pip install ".[server]"',
            file=sys.stderr,
        )
        sys.exit(2)
    console = Console(stderr=True)
    try:
        config = load_config(sys.argv[1:])
        if why := refused(config.host, config.port):
            raise SettingsError(why)
    except SettingsError as error:
        complain(console, _PROGRAM, error)
        sys.exit(2)
    handler = RichHandler(console=console, show_path=False, log_time_format="[%X]")
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], format="%(message)s")
    sys.exit(asyncio.run(_serve(config, console)))


async def _serve(config: ServerConfig, console: Console) -> int:
    # torch takes seconds to import: --help and bad settings should not wait for it.
    with console.status(f"loading {config.model}"):
        import torch

        from leyline_server.config import SettingsError
        from leyline_server.model.load import ModelRefused
        from leyline_server.model.tokenizer import TokenizerError
        from leyline_server.server import Server, build
        from leyline_server.terminal import complain, no_bars_in_a_log

        no_bars_in_a_log()
        try:
            parts = build(config)
        except (ModelRefused, TokenizerError, MemoryError) as error:
            complain(console, _PROGRAM, error, "the model is refused: ")
            return 3
        except torch.OutOfMemoryError as error:
            complain(
                console,
                _PROGRAM,
                error,
                "the device has too little memory; fewer --slots or another --memory-fraction may help: ",
            )
            return 3
        except SettingsError as error:
            complain(console, _PROGRAM, error)
            return 2
    server = Server(parts)
    try:
        await server.start()
    except RuntimeError as error:
        complain(console, _PROGRAM, refused(config.host, config.port) or error)
        return 2
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, server.request_stop)
    model, limits = parts.info.model, parts.info.limits
    ready = f"leyline-server ready: {model.name} ({model.architecture}, {model.dtype}) on {model.device}, "
    ready += f"{limits.num_slots} slots, context {limits.max_context}, at {server.address}"
    print(ready, flush=True)
    for support in parts.info.supports:
        if not support.supported:
            logging.getLogger(__name__).info("not supported: %s (%s)", support.feature, support.reason)
    await server.wait()
    logging.getLogger(__name__).info("draining")
    await server.stop()
    return 1 if server.crashed else 0


if __name__ == "__main__":
    main()
