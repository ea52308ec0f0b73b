"""What a sandboxed program's own process does before it becomes that program. Standard library only: it starts once per program."""
