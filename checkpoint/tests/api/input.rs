//! Checkpoints to work on.

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use microscale::Format;
use microscale_test_support::Scratch;
use microscale_test_support::oracle::Exact;
use safetensors::tensor::{Dtype, TensorView};

use crate::Tensors;

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Makes a tensor of floats.
    pub(crate) fn of<T: Stored>(name: impl Into<String>, shape: &[usize], values: &[T]) -> Self {
        Self::of_bytes(name, T::IN_FILE, shape, bytemuck::cast_slice(values))
    }

    /// Makes a tensor of any dtype.
    pub(crate) fn of_bytes(name: impl Into<String>, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec(), bytes: bytes.to_vec() }
    }

    /// Makes a tensor of random floats.
    pub(crate) fn noise<T: Stored>(name: impl Into<String>, shape: &[usize], seed: u64) -> Self {
        Self::of::<T>(name, shape, &noise(shape.iter().product(), seed))
    }

    /// Returns the values of a tensor of `T`.
    pub(crate) fn values<T: Stored>(&self) -> Vec<T> {
        assert_eq!(self.dtype, T::IN_FILE);
        bytemuck::pod_collect_to_vec(&self.bytes)
    }
}

/// A float with its dtype in files.
pub(crate) trait Stored: Exact {
    /// The dtype.
    const IN_FILE: Dtype;
}

impl Stored for f32 {
    const IN_FILE: Dtype = Dtype::F32;
}

impl Stored for f16 {
    const IN_FILE: Dtype = Dtype::F16;
}

impl Stored for bf16 {
    const IN_FILE: Dtype = Dtype::BF16;
}

/// Returns random values of both signs, with magnitudes from 2^-14 to 2^3.
pub(crate) fn noise<T: Stored>(elements: usize, seed: u64) -> Vec<T> {
    let mut random = fastrand::Rng::with_seed(seed);
    let powers: [f32; 16] = std::array::from_fn(|i| 2f32.powi(i as i32 - 12));
    let one = |_| {
        let (bits, power) = (random.u32(..), random.usize(..16));
        T::from_f32((bits as i32 as f32 / 2f32.powi(31) + 0.01) * powers[power])
    };
    (0..elements).map(one).collect()
}

/// Writes a file.
pub(crate) fn write_file(scratch: &Scratch, name: impl AsRef<Path>, tensors: &[Tensor]) -> PathBuf {
    let views = tensors.iter().map(|tensor| {
        (&tensor.name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
    });
    scratch.write(name, safetensors::serialize(views, None).unwrap())
}

/// Writes a directory of shards with an index.
pub(crate) fn write_model(scratch: &Scratch, directory: &str, shards: &[(&str, Vec<Tensor>)]) -> PathBuf {
    let mut entries = Vec::new();
    for (shard, tensors) in shards {
        write_file(scratch, Path::new(directory).join(shard), tensors);
        entries.extend(tensors.iter().map(|tensor| (tensor.name.as_str(), *shard)));
    }
    scratch.write_index(directory, &entries);
    scratch.path(directory)
}

/// A quantized tensor as compressed-tensors stores it.
#[derive(Debug)]
pub(crate) struct InFile<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) scales: &'a [u8],
    /// NVFP4's divisor.
    pub(crate) divisor: Option<f32>,
}

impl<'a> InFile<'a> {
    /// Takes the tensor called `name` from an output, after a check of dtypes and shapes.
    ///
    /// `shape` is the shape of its values.
    pub(crate) fn take(tensors: &'a Tensors, name: &str, shape: &[usize], format: Format) -> Self {
        let (codes_name, codes_dtype, codes_per_byte) = match format {
            Format::Mxfp4 | Format::Nvfp4 => (format!("{name}_packed"), Dtype::U8, 2),
            Format::Mxfp8E4m3 => (name.into(), Dtype::F8_E4M3, 1),
            _ => panic!("{format} is not written"),
        };
        let scales_dtype = if format == Format::Nvfp4 { Dtype::F8_E4M3 } else { Dtype::U8 };
        let (last, leading) = shape.split_last().unwrap();
        let with_last = |last: usize| [leading, &[last]].concat();
        let (dtype, found, codes) = &tensors[&codes_name];
        assert_eq!((*dtype, found), (codes_dtype, &with_last(last / codes_per_byte)), "{codes_name}");
        let (dtype, found, scales) = &tensors[&format!("{name}_scale")];
        assert_eq!((*dtype, found), (scales_dtype, &with_last(last / format.block())), "{name}_scale");
        let divisor = tensors.get(&format!("{name}_global_scale")).map(|(dtype, shape, bytes)| {
            assert_eq!((*dtype, &shape[..]), (Dtype::F32, &[1][..]), "{name}_global_scale");
            f32::from_le_bytes(bytes[..].try_into().unwrap())
        });
        Self { codes, scales, divisor }
    }
}
