"""Dead letters outside the ledger: where else they may go, how they look there, and how they come back."""
