Explanation = object


def explain(*a, **k):
    raise NotImplementedError
