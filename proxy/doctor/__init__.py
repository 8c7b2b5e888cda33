"""Says in plain words whether caching will work here, and how well."""
