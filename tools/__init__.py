"""Tools for developing and testing AnyShape. None of them is shipped with the pack."""
