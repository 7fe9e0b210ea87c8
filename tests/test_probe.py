"""The certificate sees every way in which an operator can fail to be symmetric and linear."""

import pytest
import torch

from curvlab.probe import Certificate, LinearOperator, OperatorError, probe

DTYPES = [torch.float32, torch.float64]


class Matrix:
    """``v @ matrix``, and whatever a subclass does wrong."""

    def __init__(self, matrix):
        self.matrix = matrix
        self.n, self.dtype, self.device = len(matrix), matrix.dtype, matrix.device

    def __matmul__(self, vectors):
        return vectors @ self.matrix.T


class Noisy(Matrix):
    def __matmul__(self, vectors):
        noise = torch.randn(vectors.shape, dtype=self.dtype)
        return super().__matmul__(vectors) * (1 + 1e-2 * noise)


class Affine(Matrix):
    def __matmul__(self, vectors):
        return super().__matmul__(vectors) + 1.0


class Clipped(Matrix):
    def __matmul__(self, vectors):
        return super().__matmul__(vectors).clamp(-1, 1)


class Drifting(Matrix):
    def __matmul__(self, vectors):
        self.matrix = self.matrix * 1.01
        return super().__matmul__(vectors)


class Overwriting(Matrix):
    def __matmul__(self, vectors):
        result = super().__matmul__(vectors)
        vectors.zero_()
        return result


class SharedBuffer(Matrix):
    """Right, but every product is handed out in the same memory."""

    def __matmul__(self, vectors):
        if not hasattr(self, "buffer"):
            self.buffer = torch.zeros(self.n, dtype=self.dtype)
        self.buffer.copy_(super().__matmul__(vectors))
        return self.buffer


def symmetric(n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return (matrix + matrix.T).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 33, 400])
def test_a_symmetric_matrix_passes(n, dtype):
    certificate = probe(Matrix(symmetric(n, dtype)))
    assert certificate.passed
    certificate.require()
    assert certificate.products == 4
    assert max(certificate.symmetry, certificate.linearity) < 1e3 * torch.finfo(dtype).eps


def test_a_long_vector_is_taken_in_pieces():
    n = (1 << 20) + 7
    diagonal = torch.rand(n, generator=torch.Generator().manual_seed(0))

    class Diagonal(Matrix):
        def __matmul__(self, vectors):
            return vectors * self.matrix

    assert probe(Diagonal(diagonal)).passed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-2, 1.0])
def test_asymmetry_is_seen(size, dtype):
    matrix = symmetric(60, dtype)
    skew = torch.randn(60, 60, generator=torch.Generator().manual_seed(1)).to(dtype)
    certificate = probe(Matrix(matrix + size * (skew - skew.T)))
    assert certificate.symmetry > certificate.limit
    with pytest.raises(OperatorError, match="wrong second derivative"):
        certificate.require()


def test_a_small_asymmetry_is_seen_whatever_the_seed():
    """One pair of vectors would miss it now and then: its number is small by chance."""
    matrix = symmetric(60, torch.float32)
    skew = torch.randn(60, 60, generator=torch.Generator().manual_seed(1))
    operator = Matrix(matrix + 3e-3 * (skew - skew.T))
    assert [seed for seed in range(300) if probe(operator, seed=seed).passed] == []


def test_asymmetry_in_one_entry_is_seen():
    matrix = symmetric(60)
    matrix[3, 7] += 1e-3
    assert not probe(Matrix(matrix)).passed


@pytest.mark.parametrize(
    ("operator", "field", "words"),
    [
        (Noisy, "repeatability", "dropout"),
        (Drifting, "repeatability", "changing parameters"),
        (Affine, "linearity", "constant term"),
        (Clipped, "linearity", "clipped"),
    ],
)
def test_what_is_wrong_is_named_with_its_usual_causes(operator, field, words):
    certificate = probe(operator(symmetric(20)))
    assert getattr(certificate, field) > certificate.limit
    assert (certificate.repeatability > certificate.limit) == (field == "repeatability")
    # the fifth tells the two apart, a sixth whether it can be rounding
    assert certificate.products == (5 if field == "repeatability" else 6)
    assert not certificate.passed
    with pytest.raises(OperatorError, match=words):
        certificate.require()


@pytest.mark.parametrize("operator", [Overwriting, SharedBuffer])
def test_overwritten_inputs_and_shared_buffers_do_not_disturb_the_probe(operator):
    assert probe(operator(symmetric(20))).passed


def test_nan_fails_and_zero_passes():
    matrix = symmetric(5)
    matrix[0, 0] = float("nan")
    certificate = probe(Matrix(matrix))
    assert not certificate.passed
    with pytest.raises(OperatorError):
        certificate.require()
    zero = probe(Matrix(torch.zeros(5, 5)))
    assert zero == Certificate(0.0, 0.0, 0.0, zero.limit, 4)


def test_a_product_of_another_shape_is_refused():
    class Short(Matrix):
        def __matmul__(self, vectors):
            return vectors[:-1]

    with pytest.raises(OperatorError, match="keep the shape"):
        probe(Short(symmetric(4)))


def test_the_limit_can_be_set_and_the_seed_decides_the_vectors():
    matrix = symmetric(30)
    skew = 1e-6 * torch.triu(matrix, 1)
    assert not probe(Matrix(matrix + skew)).passed
    assert probe(Matrix(matrix + skew), limit=1e-2).passed
    assert probe(Matrix(matrix + skew), seed=1) == probe(Matrix(matrix + skew), seed=1)
    assert probe(Matrix(matrix + skew), seed=1) != probe(Matrix(matrix + skew), seed=2)


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    probe(Matrix(symmetric(4)))
    assert torch.equal(before, torch.get_rng_state())


def test_the_protocol_is_the_shape_of_an_operator():
    assert isinstance(Matrix(symmetric(2)), LinearOperator)
    assert not isinstance(symmetric(2), LinearOperator)
