"""The levers that trade memory for speed or precision. Each states its choices and applies one to a model."""
