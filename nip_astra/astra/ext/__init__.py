"""Problems built from other libraries' models."""
