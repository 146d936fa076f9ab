"""Load generators on bare asyncio protocols: cheap enough not to be what is measured."""
