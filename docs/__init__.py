"""The documents for users, and what builds them."""
