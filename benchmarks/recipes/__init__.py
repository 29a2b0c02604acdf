"""How good the shipped recipes are, and how long they take; `frozen`, and Fashion-MNIST beside them."""
