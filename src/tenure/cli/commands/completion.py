"""`tenure completion`: the script that teaches a shell our commands and options."""

from __future__ import annotations

import click

from tenure.cli.output import emit_text

_VARIABLE = "_TENURE_COMPLETE"


@click.command("completion", short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands and options.

    \b
    eval "$(tenure completion bash)"                                  # in ~/.bashrc
    eval "$(tenure completion zsh)"                                   # in ~/.zshrc
    tenure completion fish > ~/.config/fish/completions/tenure.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    emit_text(kind(ctx.find_root().command, {}, "tenure", _VARIABLE).source())
