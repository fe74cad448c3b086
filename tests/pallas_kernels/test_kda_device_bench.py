"""The benchmark of KDA at given shapes: its arguments, rows and refusals."""

import pytest

from pallas_kernels.kda import bench, device_bench, peers


def test_shapes():
  shape = device_bench.parse('2x8192x96')
  assert (shape.batch, shape.length, shape.heads) == (2, 8192, 96)
  packed = device_bench.parse('70+58x3')
  assert (packed.batch, packed.length, packed.heads) == (1, 128, 3)
  assert packed.documents == (70, 58)
  ids = peers.segment_ids(packed.documents)
  assert ids.shape == (1, 128) and ids[0, 69] == 1 and ids[0, 70] == 2


@pytest.mark.parametrize('text', ['1x128', '128', '1x2x3x4', 'ax1x1', '5+x1'])
def test_mistaken_shapes(text):
  with pytest.raises(ValueError, match='write BxTxH'):
    device_bench.parse(text)


def test_unknown_peer_is_refused_before_anything_runs():
  with pytest.raises(ValueError, match="choose among .'fla', 'jla'."):
    bench.run(shapes='1x64x1', peers='fle')
  with pytest.raises(ValueError, match='a shape that is not timed'):
    bench.run(shapes='1x64x1', peers='fla@1x32x1')


def test_rows(monkeypatch, capsys):
  monkeypatch.setattr(device_bench, 'copy_bandwidth', lambda: 1e10)
  monkeypatch.setattr(device_bench, 'matmul_rate', lambda: 1e15)
  monkeypatch.setattr(
    peers, 'PEERS', {'jla': ('jax-linear-attention', 'no_such_module')}
  )
  options = dict(passes='forward', implementation='reference')
  rows = bench.run(shapes='1x64x1,40+24x1', peers='jla', **options)
  assert [row['shape'] for row in rows] == ['1x64x1', '40+24x1']
  floor = bench.traffic(device_bench.parse('1x64x1').spec, 'forward') / 1e10
  assert rows[0]['floor_ms'] == pytest.approx(floor * 1e3)
  assert 'jla is not installed' in capsys.readouterr().out
