"""Which cached pages match these tokens? Pure data structures over token ids and page ids."""
