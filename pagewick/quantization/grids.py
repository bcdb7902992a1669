"""Grids of ggml's IQ types: the points that an index in a file can stand for.

A grid is a subset of all points whose coordinates each are one of a few values (kernels/block_formats.py). It is kept
as a bit for each point, in base 85: point 0 has the lowest value in all coordinates, and the first coordinate changes
fastest. An index in a file counts the points of the grid in this order.

Source: https://github.com/ggml-org/ggml, ggml-common.h.
"""

from __future__ import annotations

import base64
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """num_values: of a coordinate. dimensions: coordinates of a point. points: a bit for each, whether it belongs."""

    num_values: int
    dimensions: int
    points: str


@cache
def grid_points(name: str) -> Tensor:
    """Return the points of the grid of a type: [number of points, dimensions] uint8.

    Coordinates are 0, 1, ...: they count the values that a coordinate may have, from the lowest on.
    """
    grid = GRIDS[name]
    data = torch.frombuffer(bytearray(base64.b85decode(grid.points)), dtype=torch.uint8)
    bits = (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    points = bits.flatten().nonzero()
    digits = points // grid.num_values ** torch.arange(grid.dimensions) % grid.num_values
    return digits.to(torch.uint8)


GRIDS: Final = {
    "IQ1_S": Grid(
        3,
        8,
        "RV5UKpaMcs2t_fdh9HWf8VD*N6opU}f*?diB^3pr0)ilj7yt-@paUwPh`Xu^kg5v+A^-}ijDnyDKv4)qA&7ub6hcu5iZBS6pa_5}2t^?jg&;"
        "^mRR~1^EW)55iY5RmB&e#Q2;#2@2q-83paMcDswg0+fFKH+2)VkbAj+<ZqOPhseCz7EyMhk5BD%`c4w3>Q03sl$in<Dd0tf&qO5mb9A|NZG0"
        "D(Y(s){HGA^{YIP!)n82}L1Pg`fxmBd9tcgn}ScLQx2!APALE6ap#;xTu1FphyBB2!f($q5>$ZDhP!j2!b#OML+;WAryt6076j!MFA;-0E&V"
        "t2%#_(1yB@%C<sL%6onuH0wAg?03Z^vimoWAx}mD5Z~%e|2m&Y~0)zm907!tK>aZ%R!XS&fBI??wi;HfklCUbOa*K*Y3@RW<gg_{YDhR3|$j"
        "qW5qOY2u=%@k!0stzghyWmfpo^lSD7v74f-(xazPP&n>!P45q6mr#DC(jBp)vvt`lRaK?<=S-jlO>C`uBgo=6$-}Y5OPtzb5(;>EVhZ5URco"
        "gsKR#s0)Iw|GFgUgMb8LENJqm3ZyFl0xAdy;;Iq=0)i?ErXb0JiI9RQ0HOelfD-_M2nYadimIx+0;ax-pvnS(YnLw2vgr_l5H70TC>7DA1ON"
        "(x0E&Vj2mzrWf~q;XA~J-a34j;?ilSlyffPhh07W6Jf>0DfQ3$FaD5{4F5-JEqAru9m2trW^MFAiJpg^J`0Ehqxq6lh=Zn&zdfB+y0g5t;`A"
        "qYfJ6hcu6iXat*P!xs=2&yV7fB*_YQ3ypLr~ptDLQx3fAc%qr7=kJYs-miju!{l;DykqTf`F<DC<rJ3sfYq1puP(zxCn~6OR}#2x}^B7svuG"
        "*Xttm*=70(UC<r2IVt^nD0;;Mjs_LStprQx}5Fnt6A^?I807W4bg`f&RQ3ypLsRjT_ssae501ypC6oM!SMIjUg00@GDtnwfL0062AC<?kD>Y"
        "@Swf=CG{=@bAFOGQxtMFFS+P!vK@2#6#Ih$sp`2mnO^6a}CHKv4)q0R",
    ),
    "IQ2_XXS": Grid(
        3,
        8,
        "RTUIf5JW*i00b0701yBG00ck)6aYW~00004002-BKtT}z0Tcv4Py|2#5C8xL5C8yB0003106+i$K@<c)6chje1ONa8000C40000000a;K000"
        "000000K1P~AaKmY_000aRL06;(h0RR91000350000001yN~1V8`)1ONa401yBG01yBG06+i`00000000001pxpA002M$000pH00000000010"
        "0000KmY&$000yO000310R;d60000G5C8xG002+`0000000000KtTWi0YCr%002M$000C4KmY&$0000000000KmY(h00aO400004000000000"
        "000000000010000008kJ_K@boD6a)Ye06+i$00cw;06;(h06;(h0RR9%5C8!H000mG5C8xK5C8xG000000RR9100000000yO01yEH000001O"
        "Na401yEL00000000C4000C45JXS_000040RR92000C4000000RR9100000KmY&$00000002M%000310000000004000000RR9100a;O00004"
        "00000002M$00000000C40000000000K>z>&0003106+i$002M$0000006+i$01yBG000pH000000000002BZK00004000000000000000000"
        "000RR910000000000000000000000000002Ni000C406+i$00ck)1ONa4000001ONa40000002D+35CA{`00004000040000G000C4KmY&%0"
        "000$00000000000003100000000000096100000000C55Ci}K0000106+i$002M$0000000031000001OPw)0RR910000000001000000000"
        "000000000000000001yBG000010000000000000000000000aO401yBG1ONa40RR910000000aO4000000000000aO400000000000000000"
        "000000000000000000000C4000001ONa40000000000000000000000",
    ),
    "IQ2_XS": Grid(
        3,
        8,
        "RaI3{RYgG+MFCV*RZvAi5Cs7MR8bH>K?DE+0RT`{ML`u60TcuPP(?ui1px#E002Ni01yQL06+i$Kve}16a)bf06;(m0RRL506-7`009650RR"
        "9101yFGRZ&nyK|loo08~*BKtTWi0Z;%?5dc5{0096108m9i07U^11ONa)K>z>&0000006+i)00031000001qA>EKmY&)000pH000001ONa40"
        "0000KmY&$003205I{iy00965P!Iq>5C9MW000mG0096100aO4L_q*R0RR91002M$000CK0000G0096200000000m{0R#X50RRvH1ONa40000"
        "G009610T2KH002Y*08mv$K~)726a)ZJML_@s0RTh*KtMqOKmh;%0000$6-5CQ1ON~K0RRO75Ci}K002M$0RaF&5C8xG000yO01yEI0RR911P"
        "}lKK>$Di002M$0000000000P(?uy1pxpA002Ni1ONp900000KmY&$5C8xG002M*0R#j95I_I`0YLx&0000$5C8xG01yBG01yBG1Oz|;KtKQh"
        "0003101!X{000000000000000KmY(hK>z>&5D)+X08jt`0000000000000mG1ONa40RRC&000000000000aOK0RR9101yBG00000000005C8"
        "xG000010000000aO40000000aO401yxW002N01pyTV08jt`P!$0H1P}xO0000100aO406+l%K@?N~5CA{`KmY&)0000100000KmY&)000000"
        "RR9H1ONm8009&L00aa80000000000000C4000mK1P}!Q00aO5009610RRvH00031000000000406+i$L;wH)K@b1{0000001yBG000yK0000"
        "00RR910000000004000001ONa400961000005C8xG5C8xG07U@=1ONa4000310000$5C8xGKokK05C8xG0RRL5002M$0000$000000000000"
        "0000000006+i$1OPw)MF0Q*002M`1ONa4000050000000jU5000310R",
    ),
    "IQ2_S": Grid(
        3,
        8,
        "RaI3{RYg@51rb$MQBXxy6a^I&R8bI6RRjPL5fD&SMO9T*6;wr0P*qhFRaF#JQ4l~?1OQPK1W*tFKowOHRaH?C0Rcb-RRly)5I{fx009&b1rP"
        "uL06+j#RZ&qzRTULc6jW7JMO76ARTKbF6hT1*1ppKT08m9$6jfCeR8bH>RTTwQ6a-KZ06-K40TcuP5C8x`RZ#>~Q4l}@0031K1W*tF5C8xK5"
        "Ci}a00aO4002}`6;VM21OX8MR8T=c1qA^V1ON~a08s=1000F5L{$_8RTKnJ5CA|F1pyQU01*HH00jX61ONm80000H6aY{V002M$02KrP0000"
        "001yBG1V8`)00ck*08mv`MO9T56hu)_MO6h=RTNZF5I{i{1W^<OPyhfxRaI3~RZ&nyK>$@%6jV_VP(c6yRTKnJ5CA{`01y;aQBXxe00aR5R8"
        "bH>K>z>&Kmbq>06+i$00000P(@W0RaF#JQ2;<y6$Mok1W*tFKokW56a)Yi00010RTNZF5I{iy096zOP!Iq>0000K1OO2L0000008~*BKtVtN"
        "0RR9{5CA{`0000001yBW00000KmY(lMHK~66a+vJ06-N50TcuP5C9MW1OWg90096100B`H1W*tFKmY&$6a)Ye5C9MW1ONm800000000mGP!I"
        "qB000mG009sH06+i$00000000001ONa406;($MG+KK5fDKE07X?4R8asxK>$Dz6#!5W0000008~{GP(?ui1pxq5Q4l~u0003208kJBPyhe`0"
        "000GK>+{-0RR91KtKTi0096%00000000C400lq*00Bi+5L8hRKtTWi5flJW5D)+W000yO01yBG0000$R8bH>K>z>&Kmbq>06+i$0000H5C8x"
        "G5C9MW002Ni01yEH00000Pyhe`01*HH0000000000002M$01*)oR1g3F000C5000mG00aO401yN~6aWAKL;(O%5CA{`00001Ko9^B0000000"
        "000000001ONa4002M$KmY&$0000100000KmY&)002M%6afGL01yBG0R",
    ),
    "IQ3_XXS": Grid(
        8,
        4,
        "6^aD{1ONai3I!qs0uTTJ6#@l{0D=G@f(0M|0000100;np5P$$Ef&c&n00aO40000W000mG08sz{2mk^A3Iz%kfB^si1p);C000003IzfI000"
        "041pom8Kmb4hA^-pY00961000pHKmY&&AOHXW00000000C40RR911qww11ONa4Dg^=o004*q1%d^D0U!VX0ucZJ0000H0000W00;m82mpWp0"
        "ssII00000000003P1n=AOHXW0tE^H00AHb1pom8Pyhe`3IQMh00aO800ICA0000000001fB*mlK>!2*03ZMW01yB`000O800008000315P$%"
        "n0Ehqp000000000G0004i0RTY&fB*mhAOHXW5C8xG00IyI001BW2mk;90000000000AO!#c0000000aO40ssI3K>$Di03ZMW01yBK000041O"
        "Na400;m800D>q000041ONa6000000000000961000mG1ONa4000mGPyi4B00062000620Du4h000mG0000%00000000005C8xGAOHXW00aO4"
        "00008000002mk^A00000r~v>300aO4002M$0RR9100aO4AOrva0U!Vf00031000620ssI21pp8L0000000001000000000000000",
    ),
    "IQ3_S": Grid(
        8,
        4,
        "r&l8gr3wX-7bA%x5C9?sqe&tWqzV8D2qFba5CwoD0f-U=2?78C6aYmCq5wb$Knef?00aO66#zvD01*HH7pnzQ08j!1OA!JI0tEm;0i+QG2_O"
        "Lkk_mzl0ssU7C=>t+L=gZ00to^I00IC2005ByPyhe`3Izfn0ssU7t5u2xDg}Tk1&JgQ1Ofm6k^l;U0*C+-B?1%*1OY$*f&d950ssIc5CQ~%0"
        "SEvAg#ZEo03ZSYAOb)E2mt^91gZoolmZ9>Di8_)0RRC+0R#aQ009610uhP<iXZ?82tot`00a>L0tFxh5I_J306+i$0ssI23IGKl000005d@J"
        "00s#O4gbD;92qFLg3Lydr0e}Pn5DEn%000001pp9$0RR93pa22@000C400;mO0003103iSY2m$~A1Q7%Pkpw^xDg*)q000040Rjj?00;m8ga"
        "Lp65CR|w5&!`NKmY&$00ck)015yA000001ONa46aWMO0000004e|q000310RVvj000mG00aOK1Rw+f0T2QJ0RR91001BW2mk~C2><{P00031"
        "AOHXW0RR91015yA00000kpKli0T2WL1OgBMC;$Ke5<vn100IC21ONae00;m8A_xHh00961000C41ONa41ONa6000000RR9100000",
    ),
}
