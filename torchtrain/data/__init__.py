"""Many documents: from files to sequences that are the same whoever reads them."""
