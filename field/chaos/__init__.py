"""Clients that lock and write, a troublemaker, and a checker that reads what they have seen."""
