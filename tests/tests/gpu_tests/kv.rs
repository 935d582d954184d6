//! Paged KV caches on a GPU have the CPU's bytes.

use half::{bf16, f16};
use microscale::formats::kv::{KvOrder, KvShape};
use microscale::gpu::{DeviceIntegers, DeviceKvCache, DeviceKvCacheMut, DeviceKvScales, DeviceSlots, Gpu};
use microscale::{Element, KvCache, KvCacheMut, KvFormat, Shape, append_kv, gather_kv};

use super::support::patterns;

pub(crate) fn caches_equal_those_of_the_cpu(gpu: &Gpu) {
    for (i, format) in [KvFormat::Nvfp4, KvFormat::Fp8].into_iter().enumerate() {
        for (j, order) in [KvOrder::Nhd, KvOrder::Hnd].into_iter().enumerate() {
            let seed = (i * 2 + j) as u64;
            let shape = KvShape { hadamard: 128, ..KvShape::new(order, 40, 16, 8, 128) };
            equal::<bf16>(gpu, &shape, format, 256, seed);
            let shape = KvShape { page_stride: 2 * 16 * 3 * 48, ..KvShape::new(order, 9, 16, 3, 48) };
            equal::<f16>(gpu, &shape, format, 33, seed);
        }
    }
}

fn equal<T: Element>(gpu: &Gpu, shape: &KvShape, format: KvFormat, tokens: usize, seed: u64) {
    let (stream, what) = (gpu.stream(), format!("{shape:?}, {format:?}, {tokens} tokens"));
    let rows = Shape::new(tokens, (shape.heads * shape.head_dim) as usize);
    let (keys, values) =
        (patterns::<T>(rows.elements(), true, seed), patterns::<T>(rows.elements(), false, seed + 9));
    let slots: Vec<i64> = (0..tokens as i64)
        .map(|row| if row % 7 == 6 { -1 } else { (row * 7 + 2) % shape.slots() as i64 })
        .collect();
    let scales = [0.02, 0.5];
    let [codes, block_scales] = format.bytes(shape.span().expect("a span") as usize);
    let mut parts = [vec![9; codes], vec![9; codes], vec![9; block_scales], vec![9; block_scales]];
    let mut on_device: Vec<_> = parts
        .iter()
        .map(|part| stream.clone_htod(if part.is_empty() { &[0][..] } else { part }).expect("memory"))
        .collect();
    let [key_codes, value_codes, key_scales, value_scales] = &mut parts;
    let cache = KvCacheMut { key_codes, value_codes, key_scales, value_scales };
    append_kv(shape, format, &keys, &values, rows, &slots, scales, cache).expect("the CPU quantizes");

    let (keys_there, values_there) =
        (stream.clone_htod(&keys).expect("memory"), stream.clone_htod(&values).expect("memory"));
    let slots_there = stream.clone_htod(&slots).expect("memory");
    let slots_of_rows = DeviceSlots::Rows(DeviceIntegers::I64((&slots_there).into()));
    let [a, b, c, d] = &mut on_device[..] else { panic!("four parts") };
    let cache = DeviceKvCacheMut {
        key_codes: a.into(),
        value_codes: b.into(),
        key_scales: c.into(),
        value_scales: d.into(),
    };
    let of_host = DeviceKvScales::Host(scales);
    gpu.append_kv_on(
        stream,
        shape,
        format,
        (&keys_there).into(),
        (&values_there).into(),
        rows,
        slots_of_rows,
        of_host,
        cache,
    )
    .unwrap_or_else(|error| panic!("{what}: {error}"));
    for (expected, found) in parts.iter().zip(&on_device) {
        let found = stream.clone_dtoh(found).expect("bytes");
        assert_eq!(found[..expected.len()], expected[..], "{what}");
    }

    let before = vec![T::from_f32(3.0); rows.elements()];
    let (mut keys, mut values) = (before.clone(), before.clone());
    let cache = KvCache {
        key_codes: &parts[0],
        value_codes: &parts[1],
        key_scales: &parts[2],
        value_scales: &parts[3],
    };
    gather_kv(shape, format, cache, &slots, scales, &mut keys, &mut values, rows)
        .expect("the CPU dequantizes");
    let (mut keys_there, mut values_there) =
        (stream.clone_htod(&before).expect("memory"), stream.clone_htod(&before).expect("memory"));
    let cache = DeviceKvCache {
        key_codes: (&on_device[0]).into(),
        value_codes: (&on_device[1]).into(),
        key_scales: (&on_device[2]).into(),
        value_scales: (&on_device[3]).into(),
    };
    gpu.gather_kv_on(
        stream,
        shape,
        format,
        cache,
        slots_of_rows,
        of_host,
        (&mut keys_there).into(),
        (&mut values_there).into(),
        rows,
    )
    .unwrap_or_else(|error| panic!("{what}: {error}"));
    let same = |found: Vec<T>, expected: &[T]| {
        assert_eq!(
            bytemuck::cast_slice::<T, u16>(&found),
            bytemuck::cast_slice::<T, u16>(expected),
            "{what}"
        );
    };
    same(stream.clone_dtoh(&keys_there).expect("keys"), &keys);
    same(stream.clone_dtoh(&values_there).expect("values"), &values);
}
