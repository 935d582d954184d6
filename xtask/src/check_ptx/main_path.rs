//! Finds the path through a kernel that most threads take, in its machine code.
//!
//! A kernel has a main path for whole blocks, and others for the ends of rows, for NaN and for slow
//! divisions. Of the paths that move the most bytes with the kernel's widest loads and stores, the
//! main path is the one with the fewest instructions. Narrower accesses do not count. Otherwise the
//! many narrow accesses for the end of a row would add up. If a loop moves at least half of these
//! bytes, one iteration of the loop is the main path.

use super::sass::Code;

/// The main path of a kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MainPath {
    /// Indices of its instructions.
    pub(super) instructions: Vec<usize>,
    pub(super) shape: PathShape,
}

/// How a path relates to loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathShape {
    /// No loop: every instruction runs at most once.
    Straight,
    /// The path goes through loops, and counts one iteration of each.
    ThroughLoops,
    /// The path is one iteration of a loop.
    OneIteration,
}

/// The instructions that may follow an instruction.
#[derive(Default)]
struct Successors {
    next: bool,
    jump: Option<usize>,
    end: bool,
}

/// Finds the main path. Returns `None` if the code has jumps with unknown targets.
pub(super) fn main_path(code: &Code) -> Option<MainPath> {
    let (whole, bits) = best(code, 0, None)?;
    let back = (0..code.instructions.len()).filter_map(|end| Some((successors(code, end)?.jump?, end)));
    // Out-of-line code jumps back too, but its target does not lead to it again.
    let turns: Vec<_> = back
        .filter(|(start, end)| start <= end)
        .filter_map(|(start, end)| best(code, start, Some(end)))
        .collect();
    let through_loops = turns.iter().any(|(turn, _)| turn.iter().any(|i| whole.contains(i)));
    let heavy = turns.into_iter().filter(|(_, moved)| *moved > 0 && 2 * moved >= bits);
    Some(match heavy.min_by_key(|(turn, _)| turn.len()) {
        Some((turn, _)) => MainPath { instructions: turn, shape: PathShape::OneIteration },
        None if through_loops => MainPath { instructions: whole, shape: PathShape::ThroughLoops },
        None => MainPath { instructions: whole, shape: PathShape::Straight },
    })
}

/// Returns the best path from an instruction to another, or to any end of the kernel.
///
/// Also returns its bits of traffic. Backward jumps are excluded, so instructions can be visited
/// from the last to the first.
fn best(code: &Code, start: usize, end: Option<usize>) -> Option<(Vec<usize>, u32)> {
    let widest = ["LDG", "STG"].map(|name| widest(code, name));
    let count = code.instructions.len();
    let last = end.unwrap_or(count.checked_sub(1)?);
    // The best path from each instruction on: bits moved, length, and first step. `None` if it does
    // not arrive.
    let mut tails: Vec<Option<(u32, usize, Option<usize>)>> = vec![None; count + 1];
    for i in (start..=last).rev() {
        let leads = successors(code, i)?;
        let arrives = if end.is_some() { end == Some(i) } else { leads.end };
        let next = leads.next.then_some(i + 1).into_iter().chain(leads.jump.filter(|target| *target > i));
        let tails_of_next = next.filter_map(|n| tails[n].map(|(bits, length, _)| (bits, length, Some(n))));
        let choices = tails_of_next.chain(arrives.then_some((0, 0, None)));
        let choice = choices.max_by_key(|(bits, length, _)| (*bits, usize::MAX - length));
        let here = code.instructions[i].access().filter(|access| widest.contains(&Some(*access)));
        let here = here.map_or(0, |(_, bits)| bits);
        tails[i] = choice.map(|(bits, length, first)| (bits + here, length + 1, first));
    }
    let (bits, ..) = tails[start]?;
    let path = std::iter::successors(Some(start), |i| tails[*i].and_then(|(.., next)| next));
    Some((path.filter(|i| code.instructions[*i].name() != "NOP").collect(), bits))
}

fn widest(code: &Code, name: &str) -> Option<(&'static str, u32)> {
    let accesses = code.instructions.iter().filter_map(|instruction| instruction.access());
    accesses.filter(|(kind, _)| *kind == name).max_by_key(|(_, bits)| *bits)
}

fn successors(code: &Code, i: usize) -> Option<Successors> {
    let instruction = &code.instructions[i];
    let jump = code.target(i);
    // `BRA P0, …` and `BRA.U UP0, …` carry their condition as an operand.
    let conditional = instruction.predicated || !instruction.operands.is_empty();
    Some(match instruction.name() {
        "EXIT" | "RET" | "KILL" => Successors { end: true, next: instruction.predicated, jump: None },
        // Diverged warps: the slow path of a shuffle.
        "BRA" if instruction.has("DIV") || instruction.has("CONV") => {
            Successors { next: true, ..Default::default() }
        }
        "BRA" | "JMP" => Successors { jump: Some(jump?), next: conditional, end: false },
        // Jumps with unknown targets. No path continues here. Other paths may exist.
        "BRX" | "JMX" | "BRXU" | "JMXU" => Successors::default(),
        _ => Successors { next: true, ..Default::default() },
    })
}

#[cfg(test)]
mod tests {
    use super::super::sass::tests::listing;
    use super::*;

    fn path(lines: &str) -> MainPath {
        main_path(&listing(lines)).unwrap()
    }

    #[test]
    fn the_wide_path_is_the_main_one() {
        let found = path(
            "S2R R0, SR_TID.X\n@P0 BRA `(.L_x_1)\nLDG.E.U8 R1, [R2]\nSTG.E.U8 [R2], R1\nEXIT\n\
                          .L_x_1:\nLDG.E.128 R4, [R2]\nBRA.DIV UR4, `(.L_x_2)\nSTG.E.64 [R2], R4\nEXIT\n\
                          .L_x_2:\nIADD R1, R1, R1\nBRA `(.L_x_1)\n.L_x_3:\nBRA `(.L_x_3)\nNOP",
        );
        assert_eq!(found, MainPath { instructions: vec![0, 1, 5, 6, 7, 8], shape: PathShape::Straight });
    }

    #[test]
    fn the_shorter_of_equal_paths_wins() {
        let found = path("LDG.E R4, [R2]\n@P0 BRA `(.L_x_1)\nIADD R1, R1, R1\n.L_x_1:\nSTG.E [R2], R4\nEXIT");
        assert_eq!(found.instructions, [0, 1, 3, 4]);
    }

    #[test]
    fn one_iteration_of_the_loop_counts() {
        let found = path(
            "LDG.E R1, [R2]\n.L_x_1:\nLDG.E.128 R4, [R2]\nFADD R1, R1, R4\n@P0 BRA `(.L_x_1)\nSTG.E [R2], R1\nEXIT",
        );
        assert_eq!(found, MainPath { instructions: vec![1, 2, 3], shape: PathShape::OneIteration });
    }

    #[test]
    fn narrow_accesses_do_not_add_up_to_a_wide_path() {
        let found = path(
            "STG.E.64 [R4], R6\n@P0 BRA `(.L_x_1)\nSTG.E.32 [R2], R1\nSTG.E.U16 [R2], R1\n.L_x_1:\n\
             @!P0 STG.E.64 [R2], R4\nEXIT",
        );
        assert_eq!(found, MainPath { instructions: vec![0, 1, 4, 5], shape: PathShape::Straight });
    }

    #[test]
    fn a_light_loop_is_noted() {
        let found = path(
            "LDG.E.128 R4, [R2]\n.L_x_1:\nFADD R1, R1, R4\n@P0 EXIT\nBRA `(.L_x_1)\n.L_x_2:\nBRA `(.L_x_2)",
        );
        assert_eq!(found, MainPath { instructions: vec![0, 1, 2], shape: PathShape::ThroughLoops });
    }

    #[test]
    fn a_predicated_exit_goes_on() {
        assert_eq!(path("@P0 EXIT\nSTG.E [R2], R1\nEXIT").instructions, [0, 1, 2]);
    }

    #[test]
    fn an_indirect_jump_has_no_path() {
        assert_eq!(main_path(&listing("BRX R4\nEXIT")), None);
    }
}
