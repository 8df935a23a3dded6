"""The mean of each window of a series."""


def windows(series, size):
    return [series[i : i + size] for i in range(len(series) - size)]


def means(series, size):
    return [sum(window) / size for window in windows(series, size)]
