import typer


def demo(ctx: typer.Context) -> None:
    """x"""
