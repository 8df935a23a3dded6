"""`leyline-server`: reads settings, loads the model, serves until Ctrl-C, drains."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from rich.console import Console
from rich.logging import RichHandler

from leyline_server.config import ServerConfig, SettingsError, load_config


def main() -> None:
    """The entry point. Exit status 2 for bad settings, 3 for a model that is refused, 1 for a crash."""
    console = Console(stderr=True)
    try:
        config = load_config(sys.argv[1:])
    except SettingsError as error:
        console.print(f"[red]leyline-server:[/] {error}", highlight=False)
        sys.exit(2)
    handler = RichHandler(console=console, show_path=False, log_time_format="[%X]")
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], format="%(message)s")
    sys.exit(asyncio.run(_serve(config, console)))


async def _serve(config: ServerConfig, console: Console) -> int:
    # torch takes seconds to import: --help and bad settings should not wait for it.
    with console.status(f"loading {config.model}"):
        from leyline_server.model.load import ModelRefused
        from leyline_server.model.tokenizer import TokenizerError
        from leyline_server.server import Server, build

        try:
            parts = build(config)
        except (ModelRefused, TokenizerError, MemoryError) as error:
            console.print(f"[red]leyline-server: the model is refused:[/] {error}", highlight=False)
            return 3
        except SettingsError as error:
            console.print(f"[red]leyline-server:[/] {error}", highlight=False)
            return 2
    server = Server(parts)
    try:
        await server.start()
    except RuntimeError as error:
        console.print(f"[red]leyline-server:[/] {config.host}:{config.port}: {error}", highlight=False)
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
