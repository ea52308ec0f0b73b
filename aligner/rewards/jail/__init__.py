"""Code that a sandboxed program's process runs before it becomes that program. Standard library only: it starts once per program."""
