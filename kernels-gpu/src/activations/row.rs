//! Which row a row of scales belongs to.

use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::activations::{RowOrder, RowScale};
use microscale_kernels_abi::launch::WARP;

use crate::hardware::warp;

/// A row of scales, and the row of values that it belongs to.
pub(super) struct Row {
    /// Whether the row of scales exists. A thread block may have more rows.
    pub(super) has_scales: bool,
    /// Whether it has values. Rows of padding have none.
    pub(super) exists: bool,
    /// The row of scales.
    pub(super) scale_row: u32,
    /// The row of values and codes.
    pub(super) number: u32,
    expert: u32,
}

impl Row {
    /// The row of a row of scales that has its number.
    #[inline(always)]
    pub(super) fn dense(params: &ActivationParams, scale_row: u32) -> Self {
        let [has_scales, exists] = [params.scale_rows, params.rows].map(|rows| scale_row < rows);
        Self { has_scales, exists, scale_row, number: scale_row, expert: 0 }
    }

    /// Finds the row of values of a row of scales. The whole warp calls it.
    ///
    /// # Safety
    /// The contract of the kernels in [`super`].
    #[inline(always)]
    pub(super) unsafe fn find(
        params: &ActivationParams,
        [offsets, scale_offsets]: [*const u32; 2],
        scale_row: u32,
    ) -> Self {
        let mut row = Self::dense(params, scale_row);
        if params.order == RowOrder::Dense as u32 {
            return row;
        }
        row.exists = false;
        if params.order == RowOrder::Masked as u32 {
            let (expert, in_expert) = params.expert_rows.divide(scale_row);
            row.expert = expert;
            row.number = expert * params.rows + in_expert;
            if row.has_scales {
                // SAFETY: rows of scales belong to experts, each with an entry.
                row.exists = in_expert < params.rows.min(unsafe { *offsets.add(expert as usize) });
            }
        } else {
            // Experts whose rows end before this one, a lane each.
            let mut first = 0;
            while first < params.experts {
                let expert = first + warp::lane();
                // SAFETY: there is an entry after each expert's.
                let ends = expert < params.experts
                    && unsafe { *scale_offsets.add(expert as usize + 1) } <= scale_row;
                row.expert += warp::ballot(ends).count_ones();
                first += WARP;
            }
            if row.expert < params.experts {
                let expert = row.expert as usize;
                // SAFETY: the expert exists, and there is an entry after its own.
                unsafe {
                    row.number = *offsets.add(expert) + (scale_row - *scale_offsets.add(expert));
                    row.exists = row.number < params.rows.min(*offsets.add(expert + 1));
                }
            }
        }
        row
    }

    /// The given scale of the row. Rows of padding have 1.
    ///
    /// # Safety
    /// The contract of the kernels in [`super`].
    #[inline(always)]
    pub(super) unsafe fn given(&self, params: &ActivationParams, scales: *const f32) -> f32 {
        if params.row_scale != RowScale::InMemory as u32 {
            params.given
        } else if self.exists {
            // SAFETY: each expert has a scale.
            unsafe { *scales.add(self.expert as usize) }
        } else {
            1.0
        }
    }
}
