"""Estimators and models of Spark ML, fitted and applied on real executors."""
