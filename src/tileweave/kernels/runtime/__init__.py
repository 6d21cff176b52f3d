"""What every kernel needs on the host: addresses of an instance, tensor descriptors, prepared
launches, a device barrier."""
