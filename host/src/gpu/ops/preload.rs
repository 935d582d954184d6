//! Compiling kernels before they are used, so that the first operation does not wait.

use microscale_kernels_abi::{Amax, Errors, Family, KernelId};

use crate::element::Dtype;
use crate::error::Result;
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::recipe::Recipe;
use crate::scheme::{Global, Scheme};

impl Gpu {
    /// Has the driver compile a family's kernels.
    ///
    /// `dtype` selects the dtype of unquantized values or results, `None` all dtypes. Without
    /// preloading, each operation waits for its kernels at its first call. Kernels that are already
    /// compiled cost nothing.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver fails.
    pub fn preload(&self, family: Family, dtype: Option<Dtype>) -> Result<()> {
        let wanted = |id: &KernelId| {
            let takes = id.kernel().dtype;
            id.family() == family && (dtype.is_none() || takes.is_none() || takes == dtype)
        };
        let of_target = |id: &KernelId| id.kernel().targets.contain(self.kernels.target());
        self.compile(KernelId::all().filter(of_target).filter(wanted))
    }

    /// [`Self::preload`] for the kernels that a recipe needs with values of a dtype.
    ///
    /// These quantize with a computed or a given global scale, and measure the loss. They are the
    /// kernels for rows that start on 16 bytes.
    ///
    /// # Errors
    /// As for [`Self::preload`], [`Error::NoKernel`](crate::Error::NoKernel) and
    /// [`Error::NoSearch`](crate::Error::NoSearch).
    pub fn preload_recipe(&self, recipe: &Recipe, dtype: Dtype) -> Result<()> {
        let mut wanted = vec![
            launch::quantizer(recipe, dtype, true)?,
            // Losses are measured on f32 values, whose rows have no gaps.
            launch::dequantizer(recipe.format(), Dtype::F32, true)?,
            Errors::Errors.of(dtype),
        ];
        if let Scheme::Nvfp4(_, global) = recipe.scheme {
            wanted.push(Amax::Aligned.of(dtype));
            if global == Global::FromAmax {
                wanted.push(Amax::Nvfp4Plan.of(dtype));
            }
        }
        self.compile(wanted)
    }

    /// Compiles kernels one after another: the driver compiles one at a time.
    fn compile(&self, wanted: impl IntoIterator<Item = KernelId>) -> Result<()> {
        wanted.into_iter().try_for_each(|id| self.kernels.ready(id).map(|_| ()))
    }
}
