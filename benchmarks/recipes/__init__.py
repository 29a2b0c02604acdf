"""How good the shipped recipes are, and how long they take; `fashion_mnist` is a script of its own."""
