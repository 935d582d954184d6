//! Tables of the blocks with the largest errors.

use microscale::BlockError;
use microscale_checkpoint::{Outcome, Summary, TensorSummary};

use super::distributions::scale;
use super::rows::table;
use super::run::WORST_BLOCKS;
use crate::markup::Markup;
use crate::text::table::{count, figure};

pub(super) fn write(m: &mut Markup, summary: &Summary) {
    let formats = summary.formats();
    let columns = formats.iter().map(|(format, _)| match formats.len() {
        1 => format!("{}·i", format.block()),
        _ => format!("{}·i ({format})", format.block()),
    });
    let columns = columns.collect::<Vec<_>>().join(" or ");
    let text = format!(
        "Rows belong to the stored matrix. Block i of a row starts at column {columns}. Both are counted from 0. \
         The scale is the value of code 1."
    );
    m.leaf("p", &[], text);
    let relative = summary.worst_relative(WORST_BLOCKS);
    list(m, summary, "By squared error relative to the block’s energy", &relative);
    list(m, summary, "By absolute squared error", &summary.worst_absolute(WORST_BLOCKS));
}

fn list(m: &mut Markup, summary: &Summary, caption: &str, blocks: &[(&TensorSummary, &BlockError)]) {
    if blocks.is_empty() {
        m.leaf("p", &[], format_args!("{caption}: no block lost anything."));
        return;
    }
    let formats = summary.formats();
    let several = formats.len() > 1;
    let mut header = vec!["tensor"];
    header.extend(several.then_some("format"));
    header.extend([">row", ">block", ">amax", ">scale byte"]);
    // Only NVFP4 multiplies the value of the byte with a global scale.
    let under_global = formats.iter().any(|(format, _)| format.has_global_scale());
    header.extend(under_global.then_some(">stored scale"));
    header.extend([">scale", ">squared error", ">relative to energy"]);
    table(m, caption, &header, |rows| {
        rows.body(|rows| {
            for (tensor, block) in blocks {
                let Outcome::Quantized { format, .. } = tensor.outcome else { continue };
                rows.row(|row| {
                    row.name(&tensor.name, true);
                    if several {
                        row.cell(format);
                    }
                    row.cell(count(block.row as u64));
                    row.cell(count(block.block as u64));
                    row.cell(figure(block.amax.into()));
                    row.cell(block.scale_bits);
                    row.cell(scale(format, block.scale_bits as u8));
                    if under_global {
                        row.cell(figure(block.scale.into()));
                    }
                    row.cell(figure(block.squared_error));
                    row.cell(figure(block.relative()));
                });
            }
        });
    });
}
