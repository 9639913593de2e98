"""The names of files beside a store that other modules than their own need."""

REQUEST = "lohan.request"  # asks a session for a copy of its store: see _requests.py
