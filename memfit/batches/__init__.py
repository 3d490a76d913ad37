"""What a batch is: its nesting, where its samples lie, how it is cut and how outputs are joined again."""
