"""How good the shipped recipes are, and how long they take; `frozen` and `fashion_mnist` are scripts of their own."""
