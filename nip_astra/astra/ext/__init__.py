"""Problems made of other libraries' models."""
