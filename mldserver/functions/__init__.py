"""The functions of a server: their life, their commands, and packages of them."""
